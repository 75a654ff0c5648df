// Package lab is a Kubernetes control plane for tests: a real kube-apiserver over a real etcd, on loopback, without kubelets. Nodes are objects that
// a test makes.
//
// The programs lie in the folder that DUNLIN_KUBE_TOOLS names; 'cargo xtask k8s test' builds them and sets it.
// Not here: what a test says to it.
package lab

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"dunlin.dev/log/testbed"
)

const (
	// tries is how often a control plane is begun: another process may take a port that was free.
	tries = 3
	// again is when something that nothing tells of is asked again.
	again = 100 * time.Millisecond
)

// Plane is a control plane that runs until the test ends.
type Plane struct {
	dir, token, address string
	processes           []*testbed.Process
}

// Tool returns a program's path.
func Tool(t testing.TB, name string) string {
	t.Helper()
	folder := os.Getenv("DUNLIN_KUBE_TOOLS")
	if folder == "" {
		t.Fatal("DUNLIN_KUBE_TOOLS has to name the folder with etcd and kube-apiserver: 'cargo xtask k8s test' does all of it")
	}
	path := filepath.Join(folder, name)
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
	return path
}

// Begin starts one.
func Begin(t testing.TB) *Plane {
	t.Helper()
	plane := &Plane{dir: t.TempDir()}
	var bytes [16]byte
	if _, err := rand.Read(bytes[:]); err != nil {
		t.Fatal(err)
	}
	plane.token = hex.EncodeToString(bytes[:])
	plane.write(t, "tokens.csv", []byte(plane.token+",admin,admin,system:masters\n"))
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	plane.write(t, "accounts.pem", pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	for try := 1; ; try++ {
		err := plane.begin(t, try)
		if err == nil {
			return plane
		}
		if try == tries {
			t.Fatal(err)
		}
		t.Logf("try %d: %v", try, err)
	}
}

func (plane *Plane) write(t testing.TB, name string, data []byte) {
	if err := os.WriteFile(filepath.Join(plane.dir, name), data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func (plane *Plane) begin(t testing.TB, try int) error {
	free, err := testbed.FreeAddresses(3)
	if err != nil {
		return err
	}
	_, port, err := net.SplitHostPort(free[2])
	if err != nil {
		return err
	}
	store, peers := "http://"+free[0], "http://"+free[1]
	etcd, err := testbed.Start(t, nil, Tool(t, "etcd"), "--data-dir", filepath.Join(plane.dir, fmt.Sprintf("etcd-%d", try)), "--log-level", "error",
		// It dies with its test: what a disk has is nothing to it, and a disk that stands still would be an error to whoever asks.
		"--unsafe-no-fsync",
		"--listen-client-urls", store, "--advertise-client-urls", store,
		"--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", "default="+peers)
	if err != nil {
		return err
	}
	server, err := testbed.Start(t, nil, Tool(t, "kube-apiserver"), "--etcd-servers", store, "--bind-address", "127.0.0.1",
		"--advertise-address", "127.0.0.1", "--endpoint-reconciler-type", "none",
		"--secure-port", port, "--cert-dir", filepath.Join(plane.dir, "certificates"),
		"--token-auth-file", filepath.Join(plane.dir, "tokens.csv"), "--authorization-mode", "RBAC",
		"--service-account-issuer", "https://lab.invalid", "--service-account-key-file", filepath.Join(plane.dir, "accounts.pem"),
		"--service-account-signing-key-file", filepath.Join(plane.dir, "accounts.pem"), "--service-cluster-ip-range", "10.0.0.0/24",
		// Nobody makes accounts here, and nobody would take the taint of a new node away.
		"--disable-admission-plugins", "ServiceAccount,TaintNodesByCondition")
	if err != nil {
		return err
	}
	plane.address = "https://" + free[2]
	client, err := kubernetes.NewForConfig(plane.Config())
	if err != nil {
		return err
	}
	late := time.After(testbed.Patience)
	for {
		ctx, end := context.WithTimeout(context.Background(), 5*time.Second)
		if _, err = client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx); err == nil {
			// It is made beside, and is not a part of what is ready.
			_, err = client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceDefault, metav1.GetOptions{})
		}
		end()
		if err == nil {
			plane.processes = []*testbed.Process{etcd, server}
			return nil
		}
		select {
		case <-etcd.Ended:
			return fmt.Errorf("etcd has ended: %s", etcd.Said())
		case <-server.Ended:
			return fmt.Errorf("kube-apiserver has ended: %s", server.Said())
		case <-late:
			return fmt.Errorf("kube-apiserver is not ready: %w: %s", err, server.Said())
		case <-time.After(again):
		}
	}
}

// Config is an administrator's.
func (plane *Plane) Config() *rest.Config {
	return &rest.Config{
		Host: plane.address, BearerToken: plane.token, QPS: 5000, Burst: 5000,
		TLSClientConfig: rest.TLSClientConfig{Insecure: true}, // its certificate is its own, and it is on loopback
	}
}

// Processes are etcd and kube-apiserver.
func (plane *Plane) Processes() []*testbed.Process { return plane.processes }

// Address is where it listens.
func (plane *Plane) Address() string { return plane.address }

// Kubeconfig writes an administrator's for a server at this address.
func (plane *Plane) Kubeconfig(t testing.TB, name, address string) string {
	config := clientcmdapi.NewConfig()
	config.Clusters["lab"] = &clientcmdapi.Cluster{Server: address, InsecureSkipTLSVerify: true}
	config.AuthInfos["admin"] = &clientcmdapi.AuthInfo{Token: plane.token}
	config.Contexts["lab"] = &clientcmdapi.Context{Cluster: "lab", AuthInfo: "admin"}
	config.CurrentContext = "lab"
	path := filepath.Join(plane.dir, name)
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	return path
}
