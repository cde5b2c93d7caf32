#!/usr/bin/env bash
# Build assigner/report/page/static/echarts.min.js again, from the versions that package-lock.json pins.
# Needs node and npm; writes nothing else into the repository than the bundle and its licences.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
static="$here/../../assigner/report/page/static"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

cp "$here"/{package.json,package-lock.json,charts.mjs} "$work"
cd "$work"
npm ci --no-audit --no-fund --loglevel=error

{
    echo "/*! A part of Apache ECharts $(node -p "require('echarts/package.json').version"), with zrender and pieces of d3"
    echo "and tslib. Built by tools/charts/build.sh. Licensed under the Apache License, Version 2.0."
    echo
    cat node_modules/echarts/NOTICE
    printf '\n\nzrender: '
    cat node_modules/zrender/LICENSE
    printf '\nd3: '
    sed 's/\*\//* \//g' node_modules/echarts/licenses/LICENSE-d3
    printf '\ntslib: '
    sed 's/\*\//* \//g' node_modules/tslib/LICENSE.txt
    echo "*/"
} > head.txt
npx esbuild charts.mjs --bundle --minify --format=iife --global-name=echarts --target=es2022 --legal-comments=none \
    --log-level=warning --outfile=body.js
cat head.txt body.js > "$static/echarts.min.js"
cp node_modules/echarts/LICENSE "$static/echarts.LICENSE.txt"
wc -c "$static/echarts.min.js"
