#![allow(dead_code)]
#![allow(unused)]
#[path = "suite/cancellation.rs"]
mod cancellation;
#[path = "suite/deferred.rs"]
mod deferred;
#[path = "suite/fenced_read.rs"]
mod fenced_read;
#[path = "suite/idempotency.rs"]
mod idempotency;
#[path = "suite/inventory.rs"]
mod inventory;
#[path = "suite/known_epochs.rs"]
mod known_epochs;
#[path = "suite/layer.rs"]
mod layer;
#[path = "suite/on_begin.rs"]
mod on_begin;
#[path = "suite/outages.rs"]
mod outages;
#[path = "suite/path_names.rs"]
mod path_names;
#[path = "suite/repeated.rs"]
mod repeated;
#[path = "suite/several.rs"]
mod several;
#[path = "suite/support/mod.rs"]
mod support;
#[path = "suite/time_limit.rs"]
mod time_limit;
#[path = "suite/turned_away.rs"]
mod turned_away;
