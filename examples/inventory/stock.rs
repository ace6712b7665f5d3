//! The stock of each SKU, in Postgres and in SQLite.

use tower_fence::fence::FenceDatabase;

/// The SQL statements of the service. Each takes a connection, so the caller chooses the
/// transaction.
pub trait Stock: FenceDatabase {
    fn create_table(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    fn get(
        conn: &mut Self::Connection,
        sku: &str,
    ) -> impl Future<Output = sqlx::Result<Option<i64>>> + Send;

    fn set(
        conn: &mut Self::Connection,
        sku: &str,
        stock: i64,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;
}

// The SQL is the same for both databases, but sqlx has different types for them.
macro_rules! stock_in {
    ($database:ty, $lock:literal) => {
        impl Stock for $database {
            async fn create_table(conn: &mut Self::Connection) -> sqlx::Result<()> {
                sqlx::raw_sql(concat!(
                    $lock,
                    "CREATE TABLE IF NOT EXISTS inventory (
                         sku TEXT PRIMARY KEY,
                         stock BIGINT NOT NULL CHECK (stock >= 0)
                     )",
                ))
                .execute(conn)
                .await?;
                Ok(())
            }

            async fn get(conn: &mut Self::Connection, sku: &str) -> sqlx::Result<Option<i64>> {
                sqlx::query_scalar("SELECT stock FROM inventory WHERE sku = $1")
                    .bind(sku)
                    .fetch_optional(conn)
                    .await
            }

            async fn set(conn: &mut Self::Connection, sku: &str, stock: i64) -> sqlx::Result<()> {
                sqlx::query(
                    "INSERT INTO inventory (sku, stock) VALUES ($1, $2)
                     ON CONFLICT (sku) DO UPDATE SET stock = excluded.stock",
                )
                .bind(sku)
                .bind(stock)
                .execute(conn)
                .await?;
                Ok(())
            }
        }
    };
}

// The advisory lock prevents two instances that start at the same time from creating the table
// concurrently.
stock_in!(sqlx::Postgres, "SELECT pg_advisory_xact_lock(3000);");
stock_in!(sqlx::Sqlite, "");
