mkdir -p /var/lib/nginx /var/log/nginx
# A key of this boot's own: none lies in the tree.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=guest -days 3650 \
    -keyout /run/nginx.key -out /run/nginx.crt
# For bulk: named by their bytes. In memory, as the whole guest.
mkdir -p /srv/www/bulk
for bytes in 102400 1048576 67108864; do head -c $bytes /dev/urandom > /srv/www/bulk/$bytes; done
exec nginx -c /etc/dunlin/nginx.conf
