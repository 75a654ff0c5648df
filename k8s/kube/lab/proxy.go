package lab

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"
)

// Proxy is the way from one client to the API server. A test holds requests on it: they arrive later, also when whoever sent them is dead.
type Proxy struct {
	Address string
	forward *httputil.ReverseProxy
	mutex   sync.Mutex
	changed *sync.Cond
	held    func(*http.Request) bool
	reads   func(*http.Request) bool
	waiting int
	done    []Request
}

// Request is one that was answered.
type Request struct {
	Method, Path string
	Status       int
	// Held says whether it was held on its way.
	Held bool
}

// BeginProxy starts one.
func (plane *Plane) BeginProxy(t testing.TB) *Proxy {
	t.Helper()
	to, err := url.Parse(plane.address)
	if err != nil {
		t.Fatal(err)
	}
	proxy := &Proxy{forward: httputil.NewSingleHostReverseProxy(to)}
	proxy.changed = sync.NewCond(&proxy.mutex)
	proxy.forward.Transport = &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
	proxy.forward.FlushInterval = -1 // watches
	direct := proxy.forward.Director
	proxy.forward.Director = func(in *http.Request) {
		direct(in)
		// A client sends no token over HTTP.
		in.Header.Set("Authorization", "Bearer "+plane.token)
	}
	proxy.forward.ErrorHandler = func(out http.ResponseWriter, _ *http.Request, _ error) { out.WriteHeader(http.StatusBadGateway) }
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	proxy.Address = "http://" + listener.Addr().String()
	server := &http.Server{Handler: proxy}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() {
		proxy.Hold(nil)
		proxy.HoldReads(nil)
		server.Close()
	})
	return proxy
}

// Hold makes requests that it says true of wait until it is given another one.
func (proxy *Proxy) Hold(held func(*http.Request) bool) {
	proxy.mutex.Lock()
	defer proxy.mutex.Unlock()
	proxy.held = held
	proxy.changed.Broadcast()
}

// HoldReads is the same for what is read; [Proxy.Hold] is of writes.
func (proxy *Proxy) HoldReads(held func(*http.Request) bool) {
	proxy.mutex.Lock()
	defer proxy.mutex.Unlock()
	proxy.reads = held
	proxy.changed.Broadcast()
}

// Waiting is how many are held.
func (proxy *Proxy) Waiting() int {
	proxy.mutex.Lock()
	defer proxy.mutex.Unlock()
	return proxy.waiting
}

// Done are the writes that were answered.
func (proxy *Proxy) Done() []Request {
	proxy.mutex.Lock()
	defer proxy.mutex.Unlock()
	return append([]Request(nil), proxy.done...)
}

// ServeHTTP passes a request on.
func (proxy *Proxy) ServeHTTP(out http.ResponseWriter, in *http.Request) {
	if in.Method == http.MethodGet {
		proxy.mutex.Lock()
		for proxy.reads != nil && proxy.reads(in) {
			proxy.waiting++
			proxy.changed.Wait()
			proxy.waiting--
		}
		proxy.mutex.Unlock()
		proxy.forward.ServeHTTP(out, in)
		return
	}
	// Read it whole while its sender lives.
	request, err := whole(in)
	if err != nil {
		out.WriteHeader(http.StatusBadGateway)
		return
	}
	proxy.mutex.Lock()
	wasHeld := proxy.held != nil && proxy.held(in)
	for proxy.held != nil && proxy.held(in) {
		proxy.waiting++
		proxy.changed.Wait()
		proxy.waiting--
	}
	proxy.mutex.Unlock()
	answer := &recorder{ResponseWriter: out}
	defer func() {
		// Also where its sender did not live to hear the answer, which ends the handler.
		proxy.mutex.Lock()
		defer proxy.mutex.Unlock()
		proxy.done = append(proxy.done, Request{in.Method, in.URL.Path, answer.status, wasHeld})
	}()
	proxy.forward.ServeHTTP(answer, request)
}

type recorder struct {
	http.ResponseWriter
	status int
}

// WriteHeader notes the answer.
func (recorder *recorder) WriteHeader(status int) {
	recorder.status = status
	recorder.ResponseWriter.WriteHeader(status)
}

// Unwrap is for flushing.
func (recorder *recorder) Unwrap() http.ResponseWriter { return recorder.ResponseWriter }

// whole returns the request with its body in memory, and bound to nobody's life.
func whole(in *http.Request) (*http.Request, error) {
	body, err := io.ReadAll(in.Body)
	if err != nil {
		return nil, err
	}
	request := in.Clone(context.WithoutCancel(in.Context()))
	request.Body, request.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return request, nil
}
