#!/bin/bash
cd /app
mv jade.txt tree.txt
