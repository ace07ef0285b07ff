#!/bin/bash
cd /app
rm owl.log
