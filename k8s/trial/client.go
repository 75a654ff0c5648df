package trial

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"

	"dunlin.dev/k8s/allocation"
)

// Client is a controller's end of a [Server].
type Client struct {
	by       string
	http     http.Client
	revision uint64
}

// NewClient returns one for the server at this Unix socket. Only one goroutine may look.
func NewClient(by, socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	return &Client{by: by, http: http.Client{Transport: &http.Transport{DialContext: dial}}}
}

// Look returns what the cluster looks like, when there are news, or after a moment.
func (client *Client) Look(ctx context.Context, _ uint64) (allocation.Cluster, error) {
	said, err := client.ask(ctx, "look", request{After: client.revision})
	client.revision = said.Revision
	return said.Cluster, err
}

// Bind makes a copy run at its place.
func (client *Client) Bind(ctx context.Context, bind allocation.BindTask) (allocation.Outcome, error) {
	said, err := client.ask(ctx, "bind", request{Bind: &bind})
	return said.Outcome, err
}

// Unbind ends a copy.
func (client *Client) Unbind(ctx context.Context, binding allocation.Binding) (allocation.Outcome, error) {
	said, err := client.ask(ctx, "unbind", request{Binding: binding})
	return said.Outcome, err
}

func (client *Client) ask(ctx context.Context, what string, asked request) (reply, error) {
	asked.By = client.by
	body, err := json.Marshal(asked)
	if err != nil {
		return reply{}, err
	}
	post, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://trial/"+what, bytes.NewReader(body))
	if err != nil {
		return reply{}, err
	}
	answer, err := client.http.Do(post)
	if err != nil {
		return reply{}, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return reply{}, fmt.Errorf("%s: %s", what, answer.Status)
	}
	var said reply
	return said, json.NewDecoder(answer.Body).Decode(&said)
}
