#!/bin/bash
cd /app
sed -i s/bread/wolf/g dove.txt
