// The functions of the schema tower_fence, called with JDBC. Jackson parses the JSON of a refusal.

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.util.UUID;
import java.util.concurrent.Callable;
import org.postgresql.util.PSQLException;

class Main {
    static Connection db;

    /** Runs one statement, and returns the first column of the first row. */
    static String call(String sql, Object... args) throws SQLException {
        try (var statement = db.prepareStatement(sql)) {
            for (int i = 0; i < args.length; i++) {
                statement.setObject(i + 1, args[i]);
            }
            statement.execute();
            var rows = statement.getResultSet(); // null after an UPDATE
            return rows != null && rows.next() ? String.valueOf(rows.getObject(1)) : "";
        }
    }

    /** Commits what the work has written, or rolls it back if there is an error. */
    static String transaction(Callable<String> work) throws Exception {
        db.setAutoCommit(false);
        try {
            call("SET LOCAL lock_timeout = '5s'");
            call("SET LOCAL idle_in_transaction_session_timeout = '15s'");
            call("SET LOCAL client_connection_check_interval = '1s'");
            var result = work.call();
            db.commit();
            return result;
        } catch (Throwable error) {
            try {
                db.rollback();
            } catch (SQLException lost) {
                error.addSuppressed(lost);
            }
            throw error;
        } finally {
            if (!db.isClosed()) {
                db.setAutoCommit(true);
            }
        }
    }

    /** Admits the token and writes, in one transaction. */
    static String setStock(String sku, long token, long stock) throws Exception {
        return transaction(() -> {
            var maxToken = call("SELECT tower_fence.admit(?, ?)", sku, token);
            call("UPDATE inventory SET stock = ? WHERE sku = ?", stock, sku);
            return maxToken;
        });
    }

    /** Returns the DETAIL of a refusal with this SQLSTATE, and rethrows any other error. */
    static JsonNode refusal(SQLException error, String sqlState) throws Exception {
        if (!sqlState.equals(error.getSQLState())) {
            throw error;
        }
        var message = ((PSQLException) error).getServerErrorMessage();
        return new ObjectMapper().readTree(message.getDetail());
    }

    static void show(String name, String sql, Object... args) throws SQLException {
        System.out.println(name + ": " + call(sql, args));
    }

    public static void main(String[] args) throws Exception {
        db = DriverManager.getConnection(System.getenv("DATABASE_URL")); // jdbc:postgresql://…
        show("max_token", "SELECT tower_fence.max_token(?)", "sku-1");

        call("SET lock_timeout = '5s'"); // acquire() may wait for a write in progress
        var acquire = "SELECT token FROM tower_fence.acquire(?, ?::interval, ?, owner => ?)";
        var leaseId = UUID.randomUUID().toString();
        var first = Long.parseLong(call(acquire, "sku-1", "30 s", leaseId, "worker-1"));
        System.out.println("acquire: " + first);
        try {
            call(acquire, "sku-1", "30 s", UUID.randomUUID().toString(), "worker-2");
        } catch (SQLException error) {
            var detail = refusal(error, "TF409"); // another holder has the lease
            System.out.println("acquire: TF409 " + detail.get("resource").asText());
        }
        var held = "SELECT concat_ws(' ', resource, token, owner) FROM tower_fence.held_leases";
        show("held_leases", held);
        var renew = "SELECT tower_fence.renew(?, ?, new_token => true, ttl_ms => ?)";
        var second = Long.parseLong(call(renew, "sku-1", leaseId, 30_000L));
        System.out.println("renew: " + second);

        System.out.println("admit: " + setStock("sku-1", second, 9));
        try {
            setStock("sku-1", first, 100);
            throw new AssertionError("the stale token was admitted");
        } catch (SQLException error) {
            var stale = refusal(error, "TF412"); // rethrows any other error
            System.out.print("admit: TF412 " + stale.get("presented_token"));
            System.out.println(" " + stale.get("max_token"));
        }

        transaction(() -> {
            // The unparsed header.
            var field = second + ";resource=\"sku-1\", 7;resource=\"sku-2\"";
            show("admit_header", "SELECT tower_fence.admit_header(?, ?)", field, "sku-2");
            return call("UPDATE inventory SET stock = ? WHERE sku = ?", 4, "sku-2");
        });

        show("release", "SELECT tower_fence.release(?, ?)", "sku-1", leaseId);
        show("break_lease", "SELECT tower_fence.break_lease(?)", "sku-1");
        show("raise", "SELECT tower_fence.raise(?, ?)", "sku-1", 5_000_000_000L);
        show("max_token", "SELECT tower_fence.max_token(?)", "sku-1");

        show("protect", "SELECT tower_fence.protect(?, ?)", "inventory", "{sku}");
        try {
            call("UPDATE inventory SET stock = 0");
            throw new AssertionError("a protected table was written without an admission");
        } catch (SQLException error) {
            var detail = refusal(error, "TF428"); // a write without an admission
            System.out.println("unfenced write: TF428 " + detail.get("resource").asText());
        }
        transaction(() -> {
            show("bypass", "SELECT tower_fence.bypass(?)", "counted by hand");
            return call("UPDATE inventory SET stock = ? WHERE sku = ?", 8, "sku-1");
        });
        show("unprotect", "SELECT tower_fence.unprotect(?)", "inventory");

        // The procedure commits, so it is called outside a transaction.
        show("remove_idle", "CALL tower_fence.remove_idle(?::interval, max_rows => 1)", "30 days");
        show("remove_idle", "CALL tower_fence.remove_idle(older_than_ms => ?)", 2_592_000_000L);
        show("stock", "SELECT string_agg(stock::text, ' ' ORDER BY sku) FROM inventory");
    }
}
