//! Writes whose tokens increase by more than one.

use std::{
    collections::HashMap,
    io::Write,
    sync::atomic::{AtomicI64, Ordering::Relaxed},
};

use crate::support::load::{Answered, Client};

/// Upper bound of the initial tokens.
pub const HIGHEST_AT_FIRST: i64 = 1_000_000;

static TOKENS: AtomicI64 = AtomicI64::new(HIGHEST_AT_FIRST);

/// Returns the next token. It is somewhat higher than the last token, as if the lock service also
/// served other resources.
pub fn next_token() -> i64 {
    TOKENS.fetch_add(rand::random_range(1..1_000_000), Relaxed) + 1
}

/// Writes of one connection, to its own resources.
pub struct Writer {
    rows: usize,
    connection: usize,
    connections: usize,
    now: (usize, i64),
    /// The last token that each resource has admitted.
    pub last: HashMap<usize, i64>,
}

impl Writer {
    pub fn all(rows: usize, connections: usize) -> Vec<Self> {
        let writer = |connection| Self {
            rows,
            connection,
            connections,
            now: (0, 0),
            last: HashMap::new(),
        };
        (0..connections).map(writer).collect()
    }
}

impl Client for Writer {
    fn request(&mut self, buffer: &mut Vec<u8>) {
        let of_each = self.rows / self.connections;
        let row = rand::random_range(0..of_each) * self.connections + self.connection;
        let token = next_token();
        self.now = (row, token);
        let written = write!(
            buffer,
            "POST /resource-{row} HTTP/1.1\r\nHost: bench\r\n\
             Fencing-Token: {token}\r\nContent-Length: 0\r\n\r\n"
        );
        written.expect("memory can be written");
    }

    fn answered(&mut self, status: u16, _body: &[u8]) -> Answered {
        if status != 204 {
            return Answered::Unexpected;
        }
        self.last.insert(self.now.0, self.now.1);
        Answered::Done
    }
}
