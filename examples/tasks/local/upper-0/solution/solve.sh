#!/bin/bash
cd /app
tr a-z A-Z < rice.txt > fox.txt
