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
    let holder = world.grants.follow();
    let takers: Vec<_> = (0..TAKERS).map(|number| world.sharer(key(number))).collect();
    takers
        .iter()
        .zip(0..)
        .for_each(|(taker, number)| world.grants.handle_named(key(number), taker));
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
    let again = told(&world.grants.follow());
    assert!(again.len() == TAKERS && again.values().all(|is_restored| *is_restored));
    assert_eq!(world.grants.state.lock().changes.len(), CHANGES_MAX);
}

/// Goal: a client that gets a right again as it is revoked, between its seat and its sources, takes from others. Method: its
/// first session loses its right after the second one joined.
#[tokio::test]
async fn a_taker_that_is_named_holders_after_its_loss_has_its_right() {
    let world = World::new();
    let holder = world.grants.follow();
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
