//! Other kinds of Postgres, over which tests run as they do over a plain one.

use std::{env, net::SocketAddr};

use sqlx::{Executor, PgConnection};

use super::proxy::{Passage, Proxy, Sender};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    Plain,
    /// `fence_resources` is partitioned by hash.
    Partitioned,
    /// A server without `xmin` and without an end of sessions.
    WithoutVersions,
    /// A server that has none of what is not in every database that speaks the protocol, and tells no time line.
    Bare,
}

tokio::task_local! {
    static VARIANT: Variant;
}

impl Variant {
    /// Runs a test whose databases are of this kind.
    pub async fn run<T>(self, test: impl Future<Output = T>) -> T {
        VARIANT.scope(self, test).await
    }

    /// That of the test that runs; or, so that a whole suite can be run over it by hand, the one that is named
    /// in `TEST_POSTGRES_VARIANT`.
    pub fn here() -> Self {
        let named = || match env::var("TEST_POSTGRES_VARIANT").as_deref() {
            Ok("partitioned") => Self::Partitioned,
            Ok("without-versions") => Self::WithoutVersions,
            Ok("bare") => Self::Bare,
            _ => Self::Plain,
        };
        VARIANT
            .try_with(|variant| *variant)
            .unwrap_or_else(|_| named())
    }

    /// What has to be done to the fence's tables.
    pub async fn prepare(self, conn: &mut PgConnection) {
        let sql = match self {
            Self::Plain | Self::WithoutVersions => return,
            Self::Partitioned => "SELECT fence_partition_resources(4)",
            Self::Bare => {
                "CREATE OR REPLACE FUNCTION fence_history() RETURNS text LANGUAGE sql \
                     AS $$ SELECT text '' $$; \
                 UPDATE fence_floors SET history = '', live_histories = ARRAY['']; \
                 DROP FUNCTION fence_catch_up(text), fence_catch_up_partition(smallint)"
            }
        };
        conn.execute(sql).await.unwrap();
    }

    /// What the server does not know.
    fn unknown(self) -> &'static [&'static str] {
        match self {
            Self::Plain | Self::Partitioned => &[],
            Self::WithoutVersions => &["xmin", "pg_terminate_backend"],
            Self::Bare => &[
                "xmin",
                "pg_terminate_backend",
                "pg_try_advisory_xact_lock_shared",
                "pg_current_xact_id",
                "fence_history",
            ],
        }
    }

    /// A way to a server that does not know some words: they reach the real one misspelt. So it fails as it does for
    /// any column or function that is not there, and its transactions with it.
    pub async fn proxy(self, server: SocketAddr) -> Option<Proxy> {
        let unknown = self.unknown();
        if unknown.is_empty() {
            return None;
        }
        let misspell = move |sender: Sender, message: &[u8]| {
            let mut message = message.to_owned();
            if sender == Sender::Client {
                for word in unknown {
                    let last = word.len() - 1;
                    for start in 0..message.len().saturating_sub(last) {
                        if message[start..].starts_with(word.as_bytes()) {
                            message[start + last] = b'Q';
                        }
                    }
                }
            }
            Passage::Instead(message)
        };
        Some(Proxy::judging(server, move || misspell).await)
    }
}

/// Runs each of these functions over other kinds of Postgres, as modules and variants that are named first. In short,
/// for functions that are generic over the database: `<DB>`, then the functions.
#[macro_export]
macro_rules! on_other_postgres {
    (<DB> $($name:ident),* $(,)?) => {
        $crate::variant::on_other_postgres!(
            [partitioned Partitioned, without_versions WithoutVersions, bare Bare]
            [$($name <sqlx::Postgres>),*]
        );
    };
    ([$($module:ident $variant:ident),*] $names:tt) => {
        $($crate::variant::on_other_postgres!(@ $module $variant $names);)*
    };
    (@ $module:ident $variant:ident [$($name:ident $(<$database:ty>)?),*]) => {
        mod $module {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let test = super::$name$(::<$database>)?();
                $crate::variant::Variant::$variant.run(test).await;
            })*
        }
    };
}

pub use crate::on_other_postgres;
