#!/bin/bash
cd /app
wc -l < moon.txt > kite.txt
