mkdir -p /var/lib/nginx /var/log/nginx
# A key of this boot's own: none lies in the tree.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=guest -days 3650 \
    -keyout /run/nginx.key -out /run/nginx.crt
exec nginx -c /etc/dunlin/nginx.conf
