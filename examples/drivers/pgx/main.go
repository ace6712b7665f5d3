// The functions of the schema tower_fence, called with pgx.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// setStock admits the token and writes, in one transaction, which any error rolls back.
func setStock(ctx context.Context, db *pgx.Conn, sku string, token, stock int64) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		const timeouts = "SET LOCAL lock_timeout = '5s'; " +
			"SET LOCAL idle_in_transaction_session_timeout = '15s'; " +
			"SET LOCAL client_connection_check_interval = '1s'"
		if _, err := tx.Exec(ctx, timeouts); err != nil {
			return err
		}
		var maxToken int64
		admit := tx.QueryRow(ctx, "SELECT tower_fence.admit($1, $2)", sku, token)
		if err := admit.Scan(&maxToken); err != nil {
			return err
		}
		fmt.Println("admit:", maxToken)
		_, err := tx.Exec(ctx, "UPDATE inventory SET stock = $1 WHERE sku = $2", stock, sku)
		return err
	})
}

// refusal is the DETAIL of an error.
type refusal struct {
	Resource       string
	PresentedToken int64 `json:"presented_token"`
	MaxToken       int64 `json:"max_token"`
}

// refusedWith returns the DETAIL of an error with this SQLSTATE, and ends the program otherwise.
func refusedWith(sqlState string, err error) (detail refusal) {
	var refused *pgconn.PgError
	if !errors.As(err, &refused) || refused.Code != sqlState {
		log.Fatalf("expected %s, not %v", sqlState, err)
	}
	check(json.Unmarshal([]byte(refused.Detail), &detail))
	return detail
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	ctx := context.Background()
	db, err := pgx.Connect(ctx, os.Getenv("DATABASE_URL"))
	check(err)
	defer db.Close(ctx)
	// Runs one statement, in the connection's open transaction if there is one, and prints its value.
	show := func(name, sql string, args ...any) {
		var value any
		check(db.QueryRow(ctx, sql, args...).Scan(&value))
		if value == nil {
			value = "null"
		}
		fmt.Printf("%s: %v\n", name, value)
	}
	show("max_token", "SELECT tower_fence.max_token($1)", "sku-1")

	_, err = db.Exec(ctx, "SET lock_timeout = '5s'") // acquire() may wait for a write in progress
	check(err)
	const acquire = "SELECT token, lease_id FROM tower_fence.acquire($1, $2, owner => $3)"
	ttl := 30 * time.Second
	var first, second int64
	var leaseID string
	check(db.QueryRow(ctx, acquire, "sku-1", ttl, "worker-1").Scan(&first, &leaseID))
	fmt.Println("acquire:", first)
	err = db.QueryRow(ctx, acquire, "sku-1", ttl, "worker-2").Scan(&second, &leaseID)
	fmt.Println("acquire: TF409", refusedWith("TF409", err).Resource) // another holder has the lease

	show("held_leases", "SELECT concat_ws(' ', resource, token, owner) FROM tower_fence.held_leases")
	const renew = "SELECT tower_fence.renew($1, $2, new_token => true, ttl_ms => $3)"
	check(db.QueryRow(ctx, renew, "sku-1", leaseID, 30_000).Scan(&second))
	fmt.Println("renew:", second)

	check(setStock(ctx, db, "sku-1", second, 9))
	err = setStock(ctx, db, "sku-1", first, 100)
	if err == nil {
		log.Fatal("the stale token was admitted")
	}
	stale := refusedWith("TF412", err)
	fmt.Println("admit: TF412", stale.PresentedToken, stale.MaxToken)

	// The unparsed header.
	field := fmt.Sprintf(`%d;resource="sku-1", 7;resource="sku-2"`, second)
	check(pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		show("admit_header", "SELECT tower_fence.admit_header($1, $2)", field, "sku-2")
		_, err := tx.Exec(ctx, "UPDATE inventory SET stock = $1 WHERE sku = $2", 4, "sku-2")
		return err
	}))

	show("release", "SELECT tower_fence.release($1, $2)", "sku-1", leaseID)
	show("break_lease", "SELECT tower_fence.break_lease($1)", "sku-1")
	show("raise", "SELECT tower_fence.raise($1, $2)", "sku-1", int64(5_000_000_000))
	show("max_token", "SELECT tower_fence.max_token($1)", "sku-1")

	show("protect", "SELECT tower_fence.protect($1, $2)", "inventory", "{sku}")
	_, err = db.Exec(ctx, "UPDATE inventory SET stock = 0")
	fmt.Println("unfenced write: TF428", refusedWith("TF428", err).Resource)
	check(pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		show("bypass", "SELECT tower_fence.bypass($1)", "counted by hand")
		_, err := tx.Exec(ctx, "UPDATE inventory SET stock = $1 WHERE sku = $2", 8, "sku-1")
		return err
	}))
	show("unprotect", "SELECT tower_fence.unprotect($1)", "inventory")

	// The procedure commits, so it is called outside a transaction.
	age := 30 * 24 * time.Hour
	show("remove_idle", "CALL tower_fence.remove_idle($1, max_rows => 1)", age)
	show("remove_idle", "CALL tower_fence.remove_idle(older_than_ms => $1)", age.Milliseconds())
	show("stock", "SELECT string_agg(stock::text, ' ' ORDER BY sku) FROM inventory")
}
