//! Connections beside the pool, by which sessions are ended.

use std::cell::Cell;

/// What has become of them in this execution.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub open: usize,
    /// The most at once.
    pub most: usize,
    /// One was used again that had been left in the middle of a statement.
    pub used_again: bool,
}

thread_local! {
    static SEEN: Cell<Seen> = const { Cell::new(Seen { open: 0, most: 0, used_again: false }) };
}

pub fn reset() {
    SEEN.set(Seen::default());
}

pub fn seen() -> Seen {
    SEEN.get()
}

fn note(change: impl FnOnce(&mut Seen)) {
    let mut seen = SEEN.get();
    change(&mut seen);
    SEEN.set(seen);
}

/// That such a connection is open.
pub struct Apart {
    is_busy: bool,
}

impl Apart {
    pub fn open() -> Self {
        note(|seen| {
            seen.open += 1;
            seen.most = seen.most.max(seen.open);
        });
        Self { is_busy: false }
    }

    pub fn begins(&mut self) {
        note(|seen| seen.used_again |= self.is_busy);
        self.is_busy = true;
    }

    pub fn ends(&mut self) {
        self.is_busy = false;
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        note(|seen| seen.open -= 1);
    }
}
