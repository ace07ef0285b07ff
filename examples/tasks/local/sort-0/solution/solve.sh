#!/bin/bash
cd /app
sort green.txt > sand.txt
