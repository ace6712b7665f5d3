//! etcd: its revisions, its log, and the keys of the store.

/// The number of partitions. Each has one resource.
pub(super) const PARTITIONS: usize = 2;

/// A token: an epoch, and the number of revisions since the row of its partition was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token {
    pub epoch: u8,
    pub n: u8,
}

/// The key of the incarnation of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incarnation {
    pub id: u8,
    /// The amount by which the log was ahead of the revision before the key was written.
    pub lead: i8,
}

/// The row of a partition: its token counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// The incarnation that the row names.
    pub incarnation: u8,
    /// The lead of the row. It is compared only if the rule `OneIncarnation` is left out.
    pub lead: i8,
    pub epoch: u8,
    /// The revision in which the row was written. Tokens are counted from this revision.
    pub written: u8,
}

/// The key of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub lease: u8,
    pub token: Token,
    /// The revision of the row from which the token was computed.
    pub base: u8,
    pub written: u8,
    /// The etcd lease to which the key belongs. When the etcd lease ends, etcd deletes the key.
    pub etcd_lease: u8,
}

impl Key {
    /// Whether the token was computed from this row.
    pub fn counts(&self, row: &Row) -> bool {
        (self.token.epoch, self.base) == (row.epoch, row.written)
    }
}

/// A transaction that writes the key of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Write {
    /// The row that the issuer has cached.
    pub row: Option<Row>,
    /// The key that the transaction replaces. `None` if the resource must be free.
    pub replaces: Option<Found>,
    pub lease: u8,
    pub etcd_lease: u8,
}

/// The key of a lease, as another request for the same lease has found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Found {
    pub written: u8,
    pub etcd_lease: u8,
    /// The token, if it is valid.
    pub token: Option<Token>,
}

/// The data that every transaction reads, whether it writes or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seen {
    pub revision: u8,
    pub incarnation: Option<Incarnation>,
    pub row: Option<Row>,
    pub key: Option<Key>,
}

/// The data of etcd. A snapshot is a copy of all data except the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Server {
    pub revision: u8,
    /// The amount by which the log is ahead of the revision.
    pub lead: i8,
    pub incarnation: Option<Incarnation>,
    pub rows: [Option<Row>; PARTITIONS],
    pub keys: [Option<Key>; PARTITIONS],
    /// The existing etcd leases, as a bit set.
    leases: u16,
}

/// The length of the log immediately after a restore.
const RESTORED_LOG: i8 = 1;

impl Server {
    /// Returns a cluster that other programs have used, and that has no key of the store.
    pub const fn empty() -> Self {
        Self {
            revision: 10,
            lead: 0,
            incarnation: None,
            rows: [None; PARTITIONS],
            keys: [None; PARTITIONS],
            leases: 0,
        }
    }

    /// Like [`empty`](Self::empty), but each partition has the first epoch.
    pub fn begun() -> Self {
        let incarnation = Incarnation { id: 1, lead: 0 };
        let row = |written| Row {
            incarnation: incarnation.id,
            lead: incarnation.lead,
            epoch: 1,
            written,
        };
        Self {
            revision: 13,
            incarnation: Some(incarnation),
            rows: [Some(row(12)), Some(row(13))],
            ..Self::empty()
        }
    }

    /// Like [`begun`](Self::begun), but etcd was restored before the incarnation began. The next
    /// restore lowers the lead by one.
    pub fn begun_after_restore() -> Self {
        let restored = Self::begun().restored();
        let lead = restored.lead + 1;
        Self {
            lead,
            incarnation: restored.incarnation.map(|incarnation| Incarnation {
                lead,
                ..incarnation
            }),
            ..restored
        }
    }

    /// Returns the cluster that is restored from this snapshot.
    pub fn restored(self) -> Self {
        let revision = i8::try_from(self.revision).expect("there are few revisions");
        Self {
            lead: RESTORED_LOG - revision,
            ..self
        }
    }

    /// Returns the length of the log.
    pub fn log(&self) -> i8 {
        self.lead + i8::try_from(self.revision).expect("there are few revisions")
    }

    pub fn has_lease(&self, id: u8) -> bool {
        self.leases & (1 << id) != 0
    }

    pub fn grant_lease(&mut self, id: u8) {
        self.leases |= 1 << id;
    }

    /// Removes an etcd lease and its keys, when it expires or is revoked. Returns whether the etcd
    /// lease existed, and the deleted key.
    pub fn end_lease(&mut self, id: u8) -> (bool, Option<Key>) {
        let existed = self.has_lease(id);
        self.leases &= !(1 << id);
        let mut ended = None;
        for slot in &mut self.keys {
            ended = ended.or(slot.take_if(|key| key.etcd_lease == id));
        }
        self.revision += u8::from(ended.is_some());
        (existed, ended)
    }

    /// Reads the data that every transaction on a resource reads.
    pub fn read(&self, resource: usize) -> Seen {
        Seen {
            revision: self.revision,
            incarnation: self.incarnation,
            row: self.rows[resource],
            key: self.keys[resource],
        }
    }

    /// Writes the key of a lease if the comparisons hold. Returns `None` if etcd refuses the write
    /// because the etcd lease no longer exists.
    pub fn write(
        &mut self,
        resource: usize,
        write: &Write,
        compares_incarnation: bool,
    ) -> Option<Seen> {
        let matches_key = match (write.replaces, self.keys[resource]) {
            (None, None) => true,
            (Some(found), Some(key)) => found.written == key.written,
            _ => false,
        };
        let row = self.rows[resource];
        let is_row = write.row.is_some_and(|cached| {
            let incarnation = self.incarnation.map(|incarnation| incarnation.id);
            let is_revision = row.is_some_and(|row| row.written == cached.written);
            is_revision && (incarnation == Some(cached.incarnation) || !compares_incarnation)
        });
        if let Some(cached) = write.row
            && matches_key
            && is_row
        {
            if !self.has_lease(write.etcd_lease) {
                return None;
            }
            self.revision += 1;
            let counted = Token {
                epoch: cached.epoch,
                n: self.revision.saturating_sub(cached.written),
            };
            self.keys[resource] = Some(Key {
                lease: write.lease,
                token: write
                    .replaces
                    .and_then(|found| found.token)
                    .unwrap_or(counted),
                base: cached.written,
                written: self.revision,
                etcd_lease: write.etcd_lease,
            });
        }
        Some(self.read(resource))
    }

    /// Writes the key of an incarnation, if `instead_of` is the id in the current key. Returns
    /// whether the key was written.
    pub fn write_incarnation(&mut self, instead_of: Option<u8>, incarnation: Incarnation) -> bool {
        let is_same = self.incarnation.map(|incarnation| incarnation.id) == instead_of;
        if is_same {
            self.revision += 1;
            self.incarnation = Some(incarnation);
        }
        is_same
    }

    /// Replaces the row that was written in this revision, if etcd still has the incarnation that
    /// the new row names.
    pub fn write_row(
        &mut self,
        partition: usize,
        instead_of: u8,
        row: Row,
        compares_incarnation: bool,
    ) -> Option<Row> {
        let written = self.rows[partition].map_or(0, |row| row.written);
        let is_incarnation = self
            .incarnation
            .is_some_and(|incarnation| incarnation.id == row.incarnation)
            || !compares_incarnation;
        (written == instead_of && is_incarnation).then(|| {
            self.revision += 1;
            let row = Row {
                written: self.revision,
                ..row
            };
            self.rows[partition] = Some(row);
            row
        })
    }
}
