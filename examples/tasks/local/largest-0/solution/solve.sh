#!/bin/bash
cd /app
ls -S | head -1 > pond.txt
