//! Each file of the store: made, changed, broken, and followed.

use super::*;
use crate::access::{Credentials, Decision, Denied, reload::LOOK};
use std::os::unix::fs::PermissionsExt;
use tensor_relay_protocol::{Glob, Topic, Verb, Verbs};

fn claims(id: u8) -> Claims {
    let grant = |topics| Grant { topics: Glob::new(topics).unwrap(), verbs: Verbs::CONSUME };
    let grants = vec![grant("policy/**"), grant("a b")];
    Claims { id: TicketId([id; 8]), holder: "Paris, 2 GPUs".into(), expires_s: Some(u64::MAX), grants }
}

fn shown(token: Token) -> Credentials {
    Credentials { token: Some(token), certificate: None }
}

#[test]
fn the_first_start_makes_a_secret_that_only_its_owner_reads() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let mode = fs::metadata(store.path("secrets")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let again = AccessStore::open(dir.path()).unwrap();
    assert_eq!(store.rules().unwrap(), again.rules().unwrap(), "it is made once");
}

#[test]
fn tickets_are_issued_listed_and_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let (first, token) = store.issue("Paris, 2 GPUs", claims(1).grants, None).unwrap();
    let (second, _) = store.issue("", vec![], Some(Duration::from_secs(60))).unwrap();
    let issued = store.issued().unwrap();
    assert_eq!([&issued[0].claims, &issued[1].claims], [&first, &second]);
    assert_eq!((first.expires_s, second.expires_s), (None, Some(issued[1].issued_s + 60)));
    assert!(store.rules().unwrap().admit(&shown(token.clone()), 0).is_ok());
    assert!(store.revoke(first.id).unwrap());
    assert!(!store.revoke(first.id).unwrap(), "once");
    assert_eq!(store.rules().unwrap().admit(&shown(token), 0), Err(Denied::Revoked(first.id)));
}

/// A ticket is revoked whatever else is broken, and stays so for a running server.
#[tokio::test(start_paused = true)]
async fn a_ticket_is_revoked_beside_a_broken_list() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let access = store.follow().unwrap();
    let (claims, _) = store.issue("", vec![], None).unwrap();
    fs::write(store.path("acl"), "nonsense").unwrap();
    assert!(AccessStore::open(dir.path()).unwrap().revoke(claims.id).unwrap());
    let look = || async {
        let mut rules = access.rules.clone();
        rules.mark_unchanged();
        let _ = tokio::time::timeout(2 * LOOK, rules.changed()).await;
        access.rules().revoked.contains(&claims.id)
    };
    assert!(look().await);
    fs::write(store.path("revoked"), "").unwrap();
    fs::remove_file(store.path("acl")).unwrap();
    assert!(look().await, "a file that was cut short lets nobody in again");
}

#[test]
fn what_no_ticket_holds_is_refused_and_not_listed() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let many = vec![Grant::everywhere(Verbs::CONSUME); 65];
    for (holder, grants) in [("a\tb", vec![]), ("a", many), (&*"a".repeat(256), vec![])] {
        let refused = store.issue(holder, grants, None);
        assert!(matches!(refused, Err(AccessStoreError::Unfit(_))), "{refused:?}");
    }
    assert_eq!(store.issued().unwrap(), []);
}

#[test]
fn keys_are_trusted_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let (one, two) = (Fingerprint([1; 32]), Fingerprint([2; 32]));
    fs::write(store.path("keys"), "# mine\n").unwrap();
    store.trust(one, "a").unwrap();
    store.trust(two, "b").unwrap();
    store.trust(one, "c").unwrap();
    assert_eq!(store.rules().unwrap().keys, [(one, "c".to_owned()), (two, "b".to_owned())].into());
    assert!(!store.distrust("a").unwrap());
    assert!(store.distrust("b").unwrap() && store.distrust(&one.to_string()).unwrap());
    assert_eq!(fs::read_to_string(store.path("keys")).unwrap(), "# mine\n", "comments stay");
}

#[test]
fn a_rotated_secret_is_valid_once_more() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let token = store.seal(&claims(1)).unwrap();
    store.rotate().unwrap();
    assert!(store.rules().unwrap().admit(&shown(token.clone()), 0).is_ok());
    assert_ne!(store.seal(&claims(1)).unwrap(), token, "new tickets have the new one");
    store.rotate().unwrap();
    assert!(store.rules().unwrap().admit(&shown(token), 0).is_err());
}

#[test]
fn broken_files_are_named_and_not_shown() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let secrets = fs::read_to_string(store.path("secrets")).unwrap();
    for (file, text, told) in [
        ("secrets", secrets[1..].to_owned(), "line 1 is not understood"),
        ("secrets", String::new(), "holds no secret"),
        ("revoked", "\n# all\nnonsense".into(), "line 3 is not understood"),
        ("keys", "sha256:00 a".into(), "line 1 is not understood"),
        ("acl", "key:a read **".into(), "line 1: there is no verb"),
        ("ca.pem", "nonsense".into(), "no certificates of authorities"),
    ] {
        let before = fs::read(store.path(file)).ok();
        fs::write(store.path(file), &text).unwrap();
        let error = store.rules().unwrap_err().to_string();
        assert!(error.contains(told) && error.contains(file), "{error}");
        assert!(text.len() < 20 || !error.contains(&text[10..20]), "{error}");
        match before {
            Some(before) => fs::write(store.path(file), before).unwrap(),
            None => fs::remove_file(store.path(file)).unwrap(),
        }
    }
    assert!(store.rules().is_ok());
}

/// Rules that cannot be read change nothing; those that can do at the next look, also where a link was exchanged.
#[tokio::test(start_paused = true)]
async fn rules_are_followed() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let access = store.follow().unwrap();
    let key = Fingerprint([5; 32]);
    let topic = Topic::new("kv/a").unwrap();
    let looked = || async {
        let mut rules = access.rules.clone();
        rules.mark_unchanged();
        let _ = tokio::time::timeout(2 * LOOK, rules.changed()).await;
        let rules = access.rules();
        let name = rules.keys.get(&key).map(|name| format!("key:{name}"));
        name.is_some_and(|name| rules.acl.decide(&name, Verb::List, &topic) != Decision::Denied)
    };
    assert!(!looked().await);
    let elsewhere = dir.path().join("elsewhere");
    fs::write(&elsewhere, "key:gpu-* list kv/*").unwrap();
    std::os::unix::fs::symlink(&elsewhere, store.path("acl")).unwrap();
    fs::write(store.path("keys"), format!("{key} gpu-1\n")).unwrap();
    assert!(looked().await);
    fs::write(&elsewhere, "nonsense").unwrap();
    assert!(looked().await, "the rules of before stay");
    fs::write(&elsewhere, "").unwrap();
    assert!(!looked().await);
}
