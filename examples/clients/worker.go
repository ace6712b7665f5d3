// A worker that decrements the stock of a SKU under a lease, with Go's standard library.
//
//	go run worker.go sku-1
//
// The README lists the environment variables.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"os"
	"time"
)

const wait = 10 * time.Second

var (
	locks   = variable("TOWER_FENCE_URL", "http://127.0.0.1:4120") + "/locks/"
	service = variable("SERVICE_URL", "http://127.0.0.1:8000") + "/inventory/"
	ttl, _  = time.ParseDuration(variable("TTL_MS", "30000") + "ms")
	work, _ = time.ParseDuration(variable("WORK_MS", "5000") + "ms")
)

// variable returns an environment variable, or a default.
func variable(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

// errLost reports that the lease has expired or was broken, and another holder may have it.
var errLost = errors.New("the lease is lost: stopped")

// client follows no redirects. Otherwise it would send a GET, even to another server. An empty
// TLSNextProto disables HTTP/2: a connection that is silently lost then delays only one request.
var client = &http.Client{
	Transport: &http.Transport{
		Proxy:        http.ProxyFromEnvironment,
		TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{},
	},
	Timeout:       wait + 5*time.Second,
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

// refusal is a response with a status of 300 or above.
type refusal struct {
	status int
	body   []byte
}

func (r *refusal) Error() string { return fmt.Sprintf("refused with %d: %s", r.status, r.body) }

// mayPass reports whether a retry may succeed: the server is unavailable, or did not respond.
func mayPass(err error) bool {
	var refused *refusal
	return !errors.As(err, &refused) || refused.status >= 500
}

// answer contains the members of the responses that this program reads.
type answer struct {
	FencingToken string `json:"fencing_token"`
	Stock        int64
}

// call returns the JSON of the response, or a *refusal.
func call(
	ctx context.Context, method, url string, header http.Header, body map[string]any,
) (result answer, err error) {
	var content io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return result, err
		}
		content = bytes.NewReader(data)
	}
	request, err := http.NewRequestWithContext(ctx, method, url, content)
	if err != nil {
		return result, err
	}
	request.Header = header.Clone()
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return result, err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode >= 300 {
		err = &refusal{response.StatusCode, data}
	} else if err == nil && len(data) > 0 {
		err = json.Unmarshal(data, &result)
	}
	return result, err
}

// acquire acquires the lease, and returns its Fencing-Token. A retry under the same lease id gets
// the lease that an earlier request was granted.
func acquire(ctx context.Context, url string, header http.Header) (string, error) {
	body := map[string]any{
		"ttl_ms": ttl.Milliseconds(), "wait_ms": wait.Milliseconds(),
		"owner": "worker.go", "lease_id": header.Get("Lease-Id"),
	}
	for retriesLeft := 2; ; retriesLeft-- {
		granted, err := call(ctx, "POST", url, header, body)
		if err == nil || retriesLeft == 0 || !mayPass(err) {
			return granted.FencingToken, err
		}
		time.Sleep(time.Second)
	}
}

// renew renews the lease, and returns its expiry, measured from before the request.
func renew(ctx context.Context, url string, header http.Header) (time.Time, error) {
	sent := time.Now()
	ctx, cancel := context.WithTimeout(ctx, ttl/3)
	defer cancel()
	renewed, err := call(ctx, "PUT", url, header, map[string]any{"ttl_ms": ttl.Milliseconds()})
	if err == nil && renewed.FencingToken == "" {
		err = errors.New("the response to the renewal comes from a proxy")
	}
	return sent.Add(ttl), err
}

// keep renews the lease at each third of its TTL, and updates its expiry. If a renewal is refused,
// the lease is lost. If the server does not respond, keep retries.
func keep(ctx context.Context, url string, header http.Header, expiry *time.Timer, lose func()) {
	for pause := ttl / 3; ; {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		end, err := renew(ctx, url, header)
		switch {
		case err == nil:
			pause = ttl / 3
			expiry.Reset(time.Until(end))
		case mayPass(err):
			pause = ttl / 10
		default:
			lose()
		}
	}
}

// withLease calls work with the Fencing-Token of a lease. If the lease is lost, withLease cancels
// the context of work, and returns errLost.
func withLease(
	ctx context.Context, resource string, work func(ctx context.Context, token string) error,
) error {
	id := make([]byte, 16) // a new lease id for each acquisition
	if _, err := rand.Read(id); err != nil {
		return err
	}
	url := locks + url.PathEscape(resource)
	header := http.Header{
		"Authorization": {"Bearer " + os.Getenv("TOWER_FENCE_SECRET")},
		"Lease-Id":      {hex.EncodeToString(id)},
	}
	// If the release fails, the lease is lost, or expires by itself.
	defer call(context.Background(), "DELETE", url, header, nil)
	token, err := acquire(ctx, url, header)
	if err != nil {
		return err
	}
	// The acquisition may have waited for longer than the TTL. A renewal returns the expiry.
	end, err := renew(ctx, url, header)
	if err != nil {
		return err
	}
	held, lose := context.WithCancel(ctx)
	defer lose()
	expiry := time.AfterFunc(time.Until(end), lose)
	go keep(held, url, header, expiry, lose)
	if err = work(held, token); held.Err() != nil {
		return errLost
	}
	return err
}

func decrement(ctx context.Context, sku, token string) error {
	url := service + url.PathEscape(sku)
	row, err := call(ctx, "GET", url, http.Header{}, nil)
	if err != nil {
		return err
	}
	fmt.Printf("the stock is %d, read under the token %s\n", row.Stock, token)
	select { // the work
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(work):
	}
	header := http.Header{"Fencing-Token": {token}}
	row, err = call(ctx, "PUT", url, header, map[string]any{"stock": row.Stock - 1})
	if err == nil {
		fmt.Printf("the stock is %d now\n", row.Stock)
	}
	return err
}

func main() {
	log.SetFlags(0)
	sku := "sku-1"
	if len(os.Args) > 1 {
		sku = os.Args[1]
	}
	err := withLease(context.Background(), sku, func(ctx context.Context, token string) error {
		return decrement(ctx, sku, token)
	})
	if err != nil {
		log.Fatal(err)
	}
}
