//! A paused holder and its successor, with SeaORM on the fence's pool.
//!
//! ```text
//! export DATABASE_URL=postgres://localhost/shop
//! cargo run --example inventory              # the issuer, which creates the stock table
//! cargo run -p example-sea-orm                # in another terminal
//! ```
//!
//! `ISSUER_URL` is the address of the issuer. Default: `http://127.0.0.1:3000/locks`.
//!
//! SeaORM 2 and this crate use the same version of sqlx, 0.9, so they can share one pool.

use std::{env, error::Error, time::Duration};

use sea_orm::{
    ActiveValue::Set, DbBackend, RuntimeErr, Statement, TransactionTrait, prelude::*,
    sea_query::OnConflict,
};
use sqlx::{PgPool, postgres::PgDatabaseError};
use tower_fence::{
    Fence, Resource, Token,
    client::HttpLeases,
    lease::{Acquire, Leases},
};

mod inventory {
    use sea_orm::entity::prelude::*;

    #[sea_orm::model]
    #[derive(Clone, Debug, DeriveEntityModel)]
    #[sea_orm(table_name = "inventory")]
    pub struct Model {
        #[sea_orm(primary_key, auto_increment = false)]
        pub sku: String,
        pub stock: i64,
    }

    impl ActiveModelBehavior for ActiveModel {}
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let pool = PgPool::connect(&env::var("DATABASE_URL")?).await?;
    let issuer = env::var("ISSUER_URL").unwrap_or_else(|_| "http://127.0.0.1:3000/locks".into());
    let fence = Fence::new(pool.clone());
    fence.migrate().await?;
    let db = DatabaseConnection::from(pool);
    let leases = HttpLeases::new(&issuer)?;
    let sku = Resource::new("sku-1")?;
    let short = Acquire::new(Duration::from_millis(500)).wait(Duration::from_secs(5));
    let long = Acquire::new(Duration::from_secs(30)).wait(Duration::from_secs(5));

    let first = leases.acquire(&sku, short).await?.token;
    println!("holder 1 leases sku-1 with token {first}, counts 100, and is paused");

    // The request waits in the queue until the lease of holder 1 has expired.
    let lease = leases.acquire(&sku, long).await?;
    let second = lease.token;
    println!("holder 2 leases sku-1 with token {second}, counts 96, and writes that");
    set_stock(&db, &sku, second, 96).await?;
    leases.release(&sku, &lease.id).await?;

    println!("holder 1 wakes up, and writes its 100");
    let Err(error) = set_stock(&db, &sku, first, 100).await else {
        return Err("holder 1 has written over holder 2".into());
    };
    let Some(refusal) = refusal(&error) else {
        return Err(error.into());
    };
    println!("refused: {} {}", refusal.code(), refusal.message());
    println!("{}", refusal.detail().unwrap_or_default());

    let row = inventory::Entity::find_by_id(sku.as_str()).one(&db).await?;
    println!("the stock is {}", row.map_or(0, |row| row.stock));
    // The fence uses the same pool, and has the token that SeaORM's transaction has admitted.
    assert_eq!(fence.inspect(&sku).await?, Some(second.get()));
    Ok(())
}

/// Checks the token and writes in one transaction. After a refusal, the transaction is dropped and
/// therefore rolled back.
async fn set_stock(
    db: &DatabaseConnection,
    sku: &Resource,
    token: Token,
    stock: i64,
) -> Result<(), DbErr> {
    let txn = db.begin().await?;
    let timeouts = "SET LOCAL lock_timeout = '5s'; \
                    SET LOCAL idle_in_transaction_session_timeout = '15s'; \
                    SET LOCAL client_connection_check_interval = '1s'";
    txn.execute_unprepared(timeouts).await?;
    txn.execute_raw(Statement::from_sql_and_values(
        DbBackend::Postgres,
        "SELECT tower_fence.admit($1, $2)",
        [sku.as_str().into(), token.get().into()],
    ))
    .await?;
    let row = inventory::ActiveModel {
        sku: Set(sku.to_string()),
        stock: Set(stock),
    };
    let over = OnConflict::column(inventory::Column::Sku)
        .update_column(inventory::Column::Stock)
        .to_owned();
    inventory::Entity::insert(row)
        .on_conflict(over)
        .exec(&txn)
        .await?;
    txn.commit().await
}

/// Returns the error of Postgres for a stale token. Its detail is the problem document.
fn refusal(error: &DbErr) -> Option<&PgDatabaseError> {
    let DbErr::Exec(RuntimeErr::SqlxError(error)) = error else {
        return None;
    };
    let error = error
        .as_database_error()?
        .try_downcast_ref::<PgDatabaseError>()?;
    (error.code() == "TF412").then_some(error)
}
