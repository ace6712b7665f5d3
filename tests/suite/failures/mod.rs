//! Clients, processes, connections and servers that fail under load, and the harm that nothing else
//! catches.

mod cancellation;
mod exclusion;
mod lost_answers;
mod lost_update;
mod outages;
mod postgres_crash;
mod psycopg_crowd;
mod repeated;
