#![doc = include_str!("docs/guide/README.md")]

#[doc = include_str!("docs/guide/choosing.md")]
pub mod choosing {}
#[doc = include_str!("docs/guide/first-fifteen-minutes.md")]
pub mod first_fifteen_minutes {}
#[doc = include_str!("docs/guide/glossary.md")]
pub mod glossary {}
#[doc = include_str!("docs/guide/reading-before-writing.md")]
pub mod reading_before_writing {}
#[doc = include_str!("docs/guide/holders.md")]
pub mod holders {}
#[doc = include_str!("docs/guide/stores.md")]
pub mod stores {}
#[doc = include_str!("docs/guide/other-lock-servers.md")]
pub mod other_lock_servers {}
#[doc = include_str!("docs/guide/signed-tokens.md")]
pub mod signed_tokens {}
#[doc = include_str!("docs/guide/writing-a-store.md")]
pub mod writing_a_store {}
#[doc = include_str!("docs/guide/guarantees.md")]
pub mod guarantees {}
#[doc = include_str!("docs/guide/resources.md")]
pub mod resources {}
#[doc = include_str!("docs/guide/ways-to-write.md")]
pub mod ways_to_write {}
#[doc = include_str!("docs/guide/idempotency.md")]
pub mod idempotency {}
#[doc = include_str!("docs/guide/queue-consumers.md")]
pub mod queue_consumers {}
#[doc = include_str!("docs/guide/protected-tables.md")]
pub mod protected_tables {}
#[doc = include_str!("docs/guide/tenants.md")]
pub mod tenants {}
#[doc = include_str!("docs/guide/clients.md")]
pub mod clients {}
#[doc = include_str!("docs/guide/other-languages.md")]
pub mod other_languages {}
#[doc = include_str!("docs/guide/leases-in-sql.md")]
pub mod leases_in_sql {}
#[doc = include_str!("docs/guide/drivers.md")]
pub mod drivers {}
#[doc = include_str!("docs/guide/generated-clients.md")]
pub mod generated_clients {}
#[doc = include_str!("docs/guide/graphql-and-grpc.md")]
pub mod graphql_and_grpc {}
#[doc = include_str!("docs/guide/cors.md")]
pub mod cors {}
#[doc = include_str!("docs/guide/failover.md")]
pub mod failover {}
#[doc = include_str!("docs/guide/citus.md")]
pub mod citus {}
#[doc = include_str!("docs/guide/migration-tools.md")]
pub mod migration_tools {}
#[doc = include_str!("docs/guide/testing.md")]
pub mod testing {}
