# One test after the other. A client that goes away in the midst of one may end the server.
while true; do
    iperf3 -s -p 5201
    sleep 0.1
done
