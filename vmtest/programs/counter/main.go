// A static Go server for the tests of bare programs: INCR and GET of redis' protocol, a goroutine for each connection.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"strconv"
	"strings"
	"sync"
)

// The longest word of a request: a key.
const longest = 1 << 16

type counters struct {
	lock   sync.Mutex
	values map[string]int64
}

func main() {
	listen := flag.String("listen", ":6379", "address and port")
	flag.Parse()
	listener, err := net.Listen("tcp4", *listen)
	if err != nil {
		log.Fatal(err)
	}
	all := counters{values: map[string]int64{}}
	for {
		connection, err := listener.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go all.serve(connection)
	}
}

func (all *counters) serve(connection net.Conn) {
	defer connection.Close()
	in := bufio.NewReader(connection)
	for {
		words, err := request(in)
		if err != nil {
			return
		}
		if _, err := io.WriteString(connection, all.answer(words)); err != nil {
			return
		}
	}
}

func (all *counters) answer(words []string) string {
	if len(words) != 2 {
		return "-ERR a command and a key\r\n"
	}
	all.lock.Lock()
	defer all.lock.Unlock()
	switch strings.ToUpper(words[0]) {
	case "INCR":
		all.values[words[1]]++
		return fmt.Sprintf(":%d\r\n", all.values[words[1]])
	case "GET":
		value, known := all.values[words[1]]
		if !known {
			return "$-1\r\n"
		}
		text := strconv.FormatInt(value, 10)
		return fmt.Sprintf("$%d\r\n%s\r\n", len(text), text)
	}
	return "-ERR unknown command\r\n"
}

func request(in *bufio.Reader) ([]string, error) {
	count, err := number(in, '*')
	if err != nil {
		return nil, err
	}
	words := make([]string, 0, 2)
	for ; count > 0; count-- {
		length, err := number(in, '$')
		if err != nil {
			return nil, err
		}
		word := make([]byte, length+2)
		if _, err := io.ReadFull(in, word); err != nil {
			return nil, err
		}
		words = append(words, string(word[:length]))
	}
	return words, nil
}

func number(in *bufio.Reader, kind byte) (int, error) {
	line, err := in.ReadString('\n')
	if err != nil {
		return 0, err
	}
	line = strings.TrimRight(line, "\r\n")
	if len(line) < 2 || line[0] != kind {
		return 0, fmt.Errorf("%q where %q was to begin", line, kind)
	}
	value, err := strconv.Atoi(line[1:])
	if err == nil && (value < 0 || value > longest) {
		err = fmt.Errorf("%d is no length", value)
	}
	return value, err
}
