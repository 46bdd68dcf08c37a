use super::*;
use crate::access::{Access, Credentials, Rules};
use std::net::SocketAddr;
use tensor_relay_protocol::{LaneGrant, Share, Site};
use tokio::sync::watch;

/// The grants of a topic, rules that may be changed, and their access.
struct World {
    grants: Arc<Grants>,
    rules: watch::Sender<Arc<Rules>>,
    access: Access,
}

impl World {
    fn new() -> Self {
        let rules = watch::Sender::new(Arc::new(Rules::open()));
        let access = Access::following(rules.subscribe());
        Self { grants: Arc::new(Grants::of(Topic::new("t").unwrap())), rules, access }
    }

    /// A client with a right, and this key.
    fn sharer(&self, key: [u8; 32]) -> Arc<Sharer> {
        let right = self.access.admit(Credentials::default()).unwrap().right();
        let address: SocketAddr = "10.0.0.1:1".parse().unwrap();
        let sharer = Sharer::new((1, &LaneGrant::new([1; 32])), right, "p".into(), address.into());
        sharer.handle_share(&Share { addresses: vec![], key: Some(key), site: Site::default() });
        Arc::new(sharer)
    }

    /// What is told to a holder that subscribes for the first time in its session, and one that does again.
    fn holders(&self) -> [Arc<Signals>; 2] {
        let sharer = self.sharer([255; 32]);
        [(); 2].map(|()| self.grants.follow(&sharer))
    }

    /// Ends the rights of all takers.
    fn end_rights(&self) {
        self.rules.send_replace(Arc::new(Rules::default()));
        self.grants.check();
    }

    fn restore_rights(&self) {
        self.rules.send_replace(Arc::new(Rules::open()));
    }
}

fn key(number: usize) -> [u8; 32] {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&(number as u64).to_le_bytes());
    key
}

/// What a holder was told since it last looked.
fn told(holder: &Signals) -> BTreeMap<[u8; 32], bool> {
    holder.with(|raised| std::mem::take(&mut raised.revocations))
}

/// Goal: a right that comes back is restored at all holders, and memory is bounded, however many rights were lost. Method: more
/// takers than changes are remembered, with a holder that is there all the time, and one that subscribes again.
#[tokio::test]
async fn every_right_that_comes_back_is_restored() {
    const TAKERS: usize = CHANGES_MAX + 100;
    let world = World::new();
    let [holder, _] = world.holders();
    let takers: Vec<_> = (0..TAKERS).map(|number| world.sharer(key(number))).collect();
    for (taker, number) in takers.iter().zip(0..) {
        assert!(world.grants.handle_named(key(number), taker));
    }
    assert!(told(&holder).is_empty(), "nobody lost anything");
    world.end_rights();
    let lost = told(&holder);
    assert!(lost.len() == TAKERS && lost.values().all(|is_restored| !is_restored));
    assert_eq!(world.grants.state.lock().changes.len(), CHANGES_MAX);
    world.restore_rights();
    for (taker, number) in takers.iter().zip(0..) {
        world.grants.handle_named(key(number), taker);
        assert_eq!(told(&holder), [(key(number), true)].into(), "{number}");
        world.grants.handle_joined(taker);
        assert!(told(&holder).is_empty(), "it is told once");
    }
    let [first, again] = world.holders().map(|holder| told(&holder));
    assert!(first.is_empty(), "nobody is without a right, and a new session has new grants");
    assert!(again.len() == TAKERS && again.values().all(|is_restored| *is_restored));
    assert_eq!(world.grants.state.lock().changes.len(), CHANGES_MAX);
}

/// Goal: a client that gets a right again as it is revoked, between its seat and its sources, takes from others. Method: its
/// first session loses its right after the second one joined.
#[tokio::test]
async fn a_taker_that_is_named_holders_after_its_loss_has_its_right() {
    let world = World::new();
    let [holder, _] = world.holders();
    world.grants.handle_named(key(1), &world.sharer(key(1)));
    let second = world.sharer(key(1));
    world.grants.handle_joined(&second);
    world.end_rights();
    assert_eq!(told(&holder), [(key(1), false)].into());
    world.grants.handle_named(key(1), &second);
    assert!(told(&holder).is_empty(), "it has none");
    world.restore_rights();
    world.grants.handle_named(key(1), &second);
    assert_eq!(told(&holder), [(key(1), true)].into());
}

/// Goal: a change that was forgotten costs nobody else anything: neither those that join later, of each of whom all others
/// would be told, nor those that they are told to.
#[tokio::test]
async fn a_forgotten_change_costs_no_others() {
    let world = World::new();
    let lost: Vec<_> = (0..=CHANGES_MAX).map(|number| world.sharer(key(number))).collect();
    for (taker, number) in lost.iter().zip(0..) {
        assert!(world.grants.handle_named(key(number), taker));
    }
    world.end_rights();
    world.restore_rights();
    assert!(world.grants.state.lock().has_forgotten);
    let [holder, _] = world.holders();
    let lost = told(&holder);
    assert!(lost.len() == CHANGES_MAX && lost.values().all(|is_restored| !is_restored));
    let joining = world.sharer(key(CHANGES_MAX + 1));
    world.grants.handle_joined(&joining);
    assert!(told(&holder).is_empty());
    assert!(world.grants.handle_named(key(CHANGES_MAX + 1), &joining));
    assert_eq!(told(&holder), [(key(CHANGES_MAX + 1), true)].into(), "as its grants have to count");
}

/// Goal: a right that is restored as a client joins is looked after, and grants are not named to one without a right.
#[tokio::test]
async fn a_right_that_was_restored_by_joining_is_looked_after() {
    let world = World::new();
    let [holder, _] = world.holders();
    let taker = world.sharer(key(1));
    assert!(world.grants.handle_named(key(1), &taker));
    world.end_rights();
    assert!(!world.grants.handle_named(key(1), &taker), "it has none");
    assert!(!world.grants.state.lock().is_looked_after);
    world.restore_rights();
    world.grants.handle_joined(&taker);
    assert_eq!(told(&holder), [(key(1), true)].into());
    assert!(world.grants.state.lock().is_looked_after);
    world.end_rights();
    assert_eq!(told(&holder), [(key(1), false)].into(), "also if it was named nobody since");
}
