//! Clients, processes, connections and servers that fail under load, and the harm that nothing else
//! catches.

mod answered;
mod cancellation;
mod etcd_tokens;
mod exclusion;
mod failover;
mod lost_answers;
mod lost_update;
mod lost_update_processes;
mod old_reads;
mod outages;
mod postgres_crash;
mod psycopg_crowd;
mod repeated;
mod restored;
mod rotation;
mod secrets;
mod tokens_of_others;
mod unreplicated;
mod zookeeper_tokens;
