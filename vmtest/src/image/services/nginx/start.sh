# What a user would set in the guest: dunlin.advice=NAME, a name of dunlin-guest.
for word in $(cat /proc/cmdline); do
    case $word in
    dunlin.advice=*) dash /etc/dunlin/dunlin-guest set "${word#dunlin.advice=}" ;;
    esac
done
mkdir -p /var/lib/nginx /var/log/nginx
# A key of this boot's own: none lies in the tree.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=guest -days 3650 \
    -keyout /run/nginx.key -out /run/nginx.crt
# For bulk: named by their bytes. In memory, as the whole guest. A translated guest makes chance slowly: one MiB of it, again and again.
mkdir -p /srv/www/bulk
cd /srv/www/bulk
head -c 1048576 /dev/urandom > 1048576
head -c 102400 1048576 > 102400
for kib in 2 4 8 16 32 60; do head -c $((kib * 1024)) 1048576 > $((kib * 1024)); done
for turn in 1 2 3 4 5 6 7 8; do cat 1048576; done > eight
for turn in 1 2 3 4 5 6 7 8; do cat eight; done > 67108864
rm eight
exec nginx -c /etc/dunlin/nginx.conf
