#!/bin/bash
cd /app
echo red > iron.txt
