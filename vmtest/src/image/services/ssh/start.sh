mkdir -p /run/sshd
# A key of this boot's own: none lies in the tree.
ssh-keygen -q -t ed25519 -N '' -f /run/ssh_host_key
exec /usr/sbin/sshd -D -e -f /etc/dunlin/sshd_config
