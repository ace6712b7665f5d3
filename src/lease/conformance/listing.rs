//! Checks of listing, while leases are granted and released.

use std::collections::BTreeSet;

use super::{
    Subject,
    steps::{LONG, eventually, grant, is_free, resource},
};
use crate::{
    lease::{Acquire, LeaseAdmin, LeaseError, LeaseId, Leases, Owner},
    token::Resource,
};

/// Number of listed leases.
const LEASES: usize = 60;
const PAGE: usize = 7;

async fn held<L: Leases>(leases: &L) -> Vec<(Resource, LeaseId)> {
    let mut held = vec![];
    for n in 0..LEASES {
        let name = resource(&format!("sku-{n}/é:{{{n}}}"));
        let owner = Owner::new(name.as_str()).expect("an owner");
        let granted = leases.acquire(&name, Acquire::new(LONG).owner(owner)).await;
        held.push((name, granted.expect("a grant").id));
    }
    held
}

pub(super) async fn every_held_lease_is_on_a_page<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let page = two.list(PAGE, None).await.expect("a page");
    assert!(page.leases.is_empty() && page.cursor.is_none());
    let names: BTreeSet<_> = held(&one).await.into_iter().map(|(name, _)| name).collect();
    let (mut listed, mut cursor) = (BTreeSet::new(), None);
    loop {
        let page = two.list(PAGE, cursor.as_deref()).await.expect("a page");
        assert!(page.leases.len() <= PAGE, "{page:?}");
        for (name, lease) in page.leases {
            assert!(lease.ttl > LONG / 2, "{lease:?}");
            let owner = lease.owner.as_ref().map(Owner::as_str);
            assert_eq!(owner, Some(name.as_str()));
            assert!(listed.insert(name), "the lease is on two pages");
        }
        match page.cursor {
            None => break,
            next => cursor = next,
        }
    }
    assert_eq!(listed, names);
}

pub(super) async fn expired_lease_is_on_no_page<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    grant(&one, S::SHORT).await;
    eventually("the lease ends", async || is_free(&one).await).await;
    let page = two.list(PAGE, None).await.expect("a page");
    assert!(page.leases.is_empty(), "{page:?}");
}

pub(super) async fn held_lease_is_listed_while_others_end<S: Subject>(subject: &S) {
    let (one, two) = subject.fresh().await;
    let mut leases = held(&one).await;
    let stay: BTreeSet<_> = leases
        .iter()
        .step_by(3)
        .map(|(name, _)| name.clone())
        .collect();
    leases.retain(|(name, _)| !stay.contains(name));
    let (mut listed, mut cursor) = (BTreeSet::new(), None);
    loop {
        let page = two.list(PAGE, cursor.as_deref()).await.expect("a page");
        listed.extend(page.leases.into_iter().map(|(name, _)| name));
        for (name, id) in leases.drain(..leases.len().min(PAGE)) {
            one.release(&name, &id).await.expect("a release");
        }
        match page.cursor {
            None => break,
            next => cursor = next,
        }
    }
    assert!(stay.is_subset(&listed), "a held lease is on no page");
}

pub(super) async fn cursor_of_no_page_is_refused<S: Subject>(subject: &S) {
    let (one, _) = subject.fresh().await;
    let refused = one.list(PAGE, Some("\u{1F680}")).await;
    assert!(
        matches!(&refused, Err(LeaseError::Invalid { field, .. }) if field == "cursor"),
        "{refused:?}"
    );
}
