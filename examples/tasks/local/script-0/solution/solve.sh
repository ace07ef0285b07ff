#!/bin/bash
cd /app
echo echo boat > fog.sh
