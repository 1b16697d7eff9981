#!/bin/sh
# What the services of compose.yaml show each other: made where it is missing, renewed in time.
#
#     credentials.sh [FOLDER]
#
# An authority signs the gateway's certificate: clients go on when that is renewed. A token is made
# anew a month before it expires; the old one holds until then, so nobody is cut off. Nothing of it
# is printed.

set -eu
umask 077
cd "${1:-/credentials}"

month_s=2592000

certificate() {
    if ! [ -s gateway/ca.key ]; then
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 \
            -subj "/CN=rl-dataplane compose" -keyout gateway/ca.key -out gateway/ca.pem 2>/dev/null
    fi
    if ! openssl x509 -checkend "$month_s" -noout -in gateway/gateway.pem >/dev/null 2>&1; then
        printf 'subjectAltName=DNS:gateway,DNS:localhost,IP:127.0.0.1\n' > gateway/names
        openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=gateway" \
            -keyout gateway/gateway.key.new -out gateway/request 2>/dev/null
        openssl x509 -req -in gateway/request -CA gateway/ca.pem -CAkey gateway/ca.key -days 90 \
            -extfile gateway/names -out gateway/gateway.pem.new 2>/dev/null
        mv gateway/gateway.key.new gateway/gateway.key
        mv gateway/gateway.pem.new gateway/gateway.pem
        rm -f gateway/names gateway/request
    fi
    for folder in inside outside; do
        cp gateway/ca.pem "$folder/ca.pem"
    done
}

# token PRINCIPAL FILE GRANT...: 90 days, made anew after 60.
token() {
    name=$1 file=$2
    shift 2
    if [ -s "$file" ] && [ -z "$(find "$file" -mtime +60)" ]; then
        return
    fi
    dataplane token create "$name" --file gateway/tokens.json --expires 90d "$@" > "$file.new" \
        2>/dev/null
    mv "$file.new" "$file"
}

# Verbs of a producer that clears what it wrote, in the partitions that follow.
produces() {
    grants="--verb put --verb put_tags --verb group --verb list --verb read --verb clear"
    for partition in "$@"; do
        grants="$grants --partition $partition"
    done
    echo "$grants"
}

certificate
# shellcheck disable=SC2046  # one word each, on purpose
token rollout outside/rollout.token $(produces rollout rollout-val)
# shellcheck disable=SC2046
token worker inside/worker.token $(produces train val 'weights@*')
token health gateway/health.token --verb list --partition health
if ! [ -s grafana/admin ]; then
    openssl rand -hex 16 > grafana/admin
    chmod 0444 grafana/admin # of another user, who alone is given this folder
fi
