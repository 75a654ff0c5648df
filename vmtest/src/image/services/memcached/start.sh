exec memcached -u root -l 0.0.0.0 -p 11211 -m 64 -c 1024
