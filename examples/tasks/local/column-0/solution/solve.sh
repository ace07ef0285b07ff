#!/bin/bash
cd /app
cut -d, -f1 tiger.csv > hill.txt
