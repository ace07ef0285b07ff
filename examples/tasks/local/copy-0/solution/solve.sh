#!/bin/bash
cd /app
cp owl.txt rice.txt
