//! Each file of the store: created, changed, broken, and followed.

#[path = "../../../../tests/src/skip.rs"]
#[expect(
    unreachable_pub,
    reason = "the crate of the tests exports it; it cannot be a dependency of this one"
)]
mod skip;

use super::*;
use crate::access::{Credentials, Decision, Denied, reload::CHECK_INTERVAL};
use skip::skip;
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::PathBuf,
    sync::Barrier,
};
use tensor_relay_protocol::{Glob, Topic, Verbs};

impl AccessStore {
    fn path(&self, file: &str) -> PathBuf {
        self.folder.path(file)
    }
}

/// The rules after the next checks.
async fn rules_after_check(access: &Access) -> Arc<Rules> {
    let mut rules = access.rules.clone();
    rules.mark_unchanged();
    let _ = tokio::time::timeout(2 * CHECK_INTERVAL, rules.changed()).await;
    access.rules()
}

fn new_claims(id: u8) -> Claims {
    let grant = |topics| Grant { topics: Glob::new(topics).unwrap(), verbs: Verbs::CONSUME };
    let grants = vec![grant("policy/**"), grant("a b")];
    Claims { id: TicketId([id; 8]), holder: "Paris, 2 GPUs".into(), expires_s: Some(u64::MAX), grants }
}

fn shown(token: Token) -> Credentials {
    Credentials { token: Some(token), ..Credentials::default() }
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
    let (first, token) = store.issue("Paris, 2 GPUs", new_claims(1).grants, None).unwrap();
    let (second, _) = store.issue("", vec![], Some(Duration::from_secs(60))).unwrap();
    let issued = store.issued().unwrap();
    assert_eq!([&issued[0].claims, &issued[1].claims], [&first, &second]);
    assert_eq!((first.expires_s, second.expires_s), (None, Some(issued[1].issued_s + 60)));
    assert!(store.rules().unwrap().admit(&shown(token.clone()), 0).is_ok());
    assert!(store.revoke(first.id).unwrap());
    assert!(!store.revoke(first.id).unwrap(), "once");
    let mode = |file| fs::metadata(store.path(file)).unwrap().mode() & 0o777;
    assert_eq!([mode("issued"), mode("revoked")], [0o600; 2]);
    assert_eq!(store.rules().unwrap().admit(&shown(token), 0), Err(Denied::Revoked(first.id)));
}

/// A ticket can be revoked while other files are broken, and stays revoked for a running server.
#[tokio::test(start_paused = true)]
async fn a_ticket_is_revoked_despite_a_broken_list() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let access = store.watch_changes().unwrap();
    let (claims, _) = store.issue("", vec![], None).unwrap();
    fs::write(store.path("acl"), "nonsense").unwrap();
    assert!(AccessStore::open(dir.path()).unwrap().revoke(claims.id).unwrap());
    let look = || async { rules_after_check(&access).await.revoked.contains(&claims.id) };
    assert!(look().await);
    assert!(access.problem().unwrap().contains("acl"));
    fs::write(store.path("revoked"), "").unwrap();
    fs::remove_file(store.path("acl")).unwrap();
    assert!(look().await, "a truncated file must readmit nobody");
}

#[test]
fn invalid_tickets_are_refused_and_not_listed() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let publishing = vec![Grant::everywhere(Verbs::of([Verb::Publish]))];
    let refused = store.issue("a", publishing, None).unwrap_err().to_string();
    assert!(refused.contains("a ticket cannot grant `publish`"), "{refused}");
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
    let kept = format!("# mine\nrevoked {one}\nrevoked {two}\n");
    assert_eq!(fs::read_to_string(store.path("keys")).unwrap(), kept, "comments stay");
    assert_eq!(store.rules().unwrap().revoked_keys, [one, two].into());
    store.trust(two, "b").unwrap();
    assert_eq!(store.rules().unwrap().revoked_keys, [one].into(), "it may be trusted again");
    store.trust(one, "b").unwrap();
    assert!(store.distrust("b").unwrap());
    assert_eq!(store.rules().unwrap().revoked_keys, [one, two].into(), "all keys of a name are revoked");
}

/// A file of any size takes bounded memory.
#[test]
fn too_large_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    // Without data on the disk. No system reserves memory for 8 TiB.
    let huge = fs::File::create(store.path("acl")).unwrap();
    if let Err(error) = huge.set_len(1 << 43) {
        return skip(format_args!("the file system has no such large files: {error}"));
    }
    let error = store.rules().unwrap_err().to_string();
    assert!(error.contains("has more than"), "{error}");
}

#[test]
fn a_rotated_secret_is_valid_until_the_next_rotation() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let token = store.seal(&new_claims(1)).unwrap();
    store.rotate().unwrap();
    let (made, _) = store.issue("", vec![], None).unwrap();
    let listed = |store: &AccessStore| {
        let issued = store.issued().unwrap().remove(0);
        assert_eq!(issued.claims, made);
        store.rules().unwrap().check_issued(&issued, 0)
    };
    assert!(listed(&store).is_ok());
    assert!(store.rules().unwrap().admit(&shown(token.clone()), 0).is_ok());
    assert_ne!(store.seal(&new_claims(1)).unwrap(), token, "new tickets have the new one");
    store.rotate().unwrap();
    assert!(store.rules().unwrap().admit(&shown(token), 0).is_err());
    assert!(listed(&store).is_ok(), "it was made after the first rotation");
    store.rotate().unwrap();
    assert!(matches!(listed(&store), Err(Denied::Token(_))), "the list names its secret");
}

/// Goal: what a hand edit left in a file neither joins with the next line nor is lost. Method: a last line without a
/// line end, the line ends and the mark of other systems, a line that is not one, and a link.
#[test]
fn changes_follow_hand_edits() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let ids: Vec<_> = (0..5).map(|id| TicketId([id; 8])).collect();
    fs::write(store.path("revoked"), format!("\u{feff}{}\r\n{}\r{}", ids[0], ids[1], ids[2])).unwrap();
    assert!(store.revoke(ids[3]).unwrap() && !store.revoke(ids[2]).unwrap());
    assert_eq!(store.rules().unwrap().revoked, ids[..4].iter().copied().collect());
    let linked = dir.path().join("linked");
    fs::write(&linked, "# by hand\nnonsense").unwrap();
    fs::set_permissions(&linked, fs::Permissions::from_mode(0o640)).unwrap();
    fs::remove_file(store.path("revoked")).unwrap();
    std::os::unix::fs::symlink(&linked, store.path("revoked")).unwrap();
    assert!(store.revoke(ids[4]).unwrap(), "a wrong line elsewhere does not prevent it");
    assert_eq!(fs::read_to_string(&linked).unwrap(), format!("# by hand\nnonsense\n{}\n", ids[4]));
    assert_eq!(
        fs::metadata(&linked).unwrap().permissions().mode() & 0o777,
        0o640,
        "whoever read it still can"
    );
    assert!(store.refused()[0].to_string().contains("line 2 is invalid"));
}

/// Goal: no command makes a truncated name valid: `gpu-10` without its end may be another client's. What narrows access
/// is still written. Method: trust, rename and revoke keys beside such a line.
#[test]
fn an_unfinished_name_stays_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let [one, two, three] = [1, 2, 3].map(|key| Fingerprint([key; 32]));
    let keys = format!("{one} a\n{two} gpu-1");
    fs::write(store.path("keys"), &keys).unwrap();
    let refused = store.trust(three, "c").unwrap_err().to_string();
    assert!(refused.contains("keys: its last line has no line end"), "{refused}");
    assert!(store.trust(one, "b").is_err());
    assert_eq!(fs::read_to_string(store.path("keys")).unwrap(), keys);
    assert!(store.distrust("a").unwrap());
    assert_eq!(
        fs::read_to_string(store.path("keys")).unwrap(),
        format!("revoked {one}\n{two} gpu-1"),
        "the last line stays unfinished"
    );
    assert!(store.refused()[0].to_string().contains("no line end"));
    assert!(store.distrust("gpu-1").unwrap() && store.refused().is_empty());
    assert_eq!(store.rules().unwrap().revoked_keys, [one, two].into());
}

/// Lines of `revoked` and `keys` may end with comments, as those of `acl`.
#[test]
fn lines_may_have_comments() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let (one, two, ids) = (Fingerprint([1; 32]), Fingerprint([2; 32]), [1, 2].map(|id| TicketId([id; 8])));
    fs::write(store.path("revoked"), format!("# all\n{} # leaked\n{}\t#\n", ids[0], ids[1])).unwrap();
    fs::write(store.path("keys"), format!("{one} a#1 # in Paris\nrevoked {two} # leaked\n")).unwrap();
    let rules = store.rules().unwrap();
    assert_eq!((rules.revoked, rules.revoked_keys), (ids.into(), [two].into()));
    assert_eq!(rules.keys, [(one, "a#1".to_owned())].into());
    assert!(!store.revoke(ids[0]).unwrap(), "it was revoked before");
}

/// Goal: a lost secret is made anew by a server only, and its tickets are listed as invalid, also afterwards. Method:
/// issue, lose the secret, read and change the other files, and start again.
#[test]
fn a_lost_secret_is_replaced_by_a_server_only() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let (_, token) = store.issue("", vec![], None).unwrap();
    fs::remove_file(store.path("secrets")).unwrap();
    let store = AccessStore::existing(dir.path());
    store.revoke(TicketId([1; 8])).unwrap();
    store.trust(Fingerprint([1; 32]), "a").unwrap();
    for error in [store.issue("", vec![], None).unwrap_err(), store.rotate().unwrap_err()] {
        assert!(error.to_string().contains("secrets: it is missing"), "{error}");
    }
    assert!(store.has_made_tickets() && store.lost_secret().is_some() && !store.path("secrets").exists());
    let is_refused = |store: &AccessStore| {
        let (rules, issued) = (store.rules().unwrap(), store.issued().unwrap());
        let listed = rules.check_issued(&issued[0], 0);
        let unrecorded = rules.check_issued(&IssuedTicket { secret: None, ..issued[0].clone() }, 0);
        let shown = rules.admit(&shown(token.clone()), 0).map(drop);
        assert_eq!((&listed, unrecorded.is_err()), (&shown, rules.secrets.is_empty()));
        listed.is_err()
    };
    assert!(is_refused(&store) && is_refused(&AccessStore::open(dir.path()).unwrap()));
    let fresh = AccessStore::existing(&dir.path().join("fresh"));
    fresh.trust(Fingerprint([1; 32]), "a").unwrap();
    assert!(!fresh.has_made_tickets() && fresh.rules().unwrap().keys.len() == 1);
}

/// A server of another user, which reads root's files by its group, can also read what root changes later.
#[test]
fn changes_by_root_stay_readable() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can give files away");
    }
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    std::os::unix::fs::chown(store.path("secrets"), None, Some(7)).unwrap();
    fs::set_permissions(store.path("secrets"), fs::Permissions::from_mode(0o640)).unwrap();
    store.rotate().unwrap();
    store.revoke(TicketId([1; 8])).unwrap();
    for file in ["secrets", "revoked"] {
        let found = fs::metadata(store.path(file)).unwrap();
        assert_eq!((found.gid(), found.mode() & 0o777), (7, 0o640), "{file}");
    }
}

/// Goal: of concurrent changes of a file none is lost. Method: threads that trust, revoke, rotate and issue.
#[test]
fn concurrent_changes_are_all_kept() {
    const EACH: u8 = 8;
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let keys: Vec<_> = (0..4 * EACH).map(|key| Fingerprint([key; 32])).collect();
    for key in &keys[..2 * EACH as usize] {
        store.trust(*key, &key.to_string()).unwrap();
    }
    std::thread::scope(|scope| {
        for part in keys.chunks(EACH.into()) {
            let store = &store;
            scope.spawn(move || {
                for key in part {
                    match key.0[0] < 2 * EACH {
                        true => assert!(store.distrust(&key.to_string()).unwrap()),
                        false => store.trust(*key, "new").unwrap(),
                    }
                    store.issue("", vec![], None).unwrap();
                    store.revoke(TicketId([key.0[0]; 8])).unwrap();
                }
            });
        }
    });
    let rules = store.rules().unwrap();
    let half = 2 * usize::from(EACH);
    assert_eq!(rules.revoked_keys, keys[..half].iter().copied().collect());
    assert!(keys[half..].iter().all(|key| rules.keys.contains_key(key)));
    assert_eq!((store.issued().unwrap().len(), rules.revoked.len()), (keys.len(), keys.len()));
    assert_eq!(fs::read_dir(store.path("")).unwrap().count(), 4, "no temporary file stays");
}

/// Goal: while one file is refused, a running server follows the others, and what the refused one revokes. Method:
/// each file refused in turn, with a change of each other one.
#[tokio::test(start_paused = true)]
async fn a_refused_file_holds_up_no_other() {
    let good = |store: &AccessStore| {
        fs::write(store.path("keys"), format!("{} a\n{} b\n", Fingerprint([1; 32]), Fingerprint([2; 32])))
            .unwrap();
        fs::write(store.path("acl"), "key:a list **\nkey:b list **\n").unwrap();
    };
    let refuse: [(&str, &str); 6] = [
        ("acl", "key:a list **"),
        ("acl", ""),
        ("keys", "nonsense\n"),
        ("revoked", "0101010101010101\n02020202020202020303030303030303\n"),
        ("ca.pem", "nonsense"),
        ("secrets", "nonsense"),
    ];
    for (refused, text) in refuse {
        let dir = tempfile::tempdir().unwrap();
        let store = AccessStore::open(dir.path()).unwrap();
        good(&store);
        let access = store.watch_changes().unwrap();
        let before = access.rules();
        fs::write(store.path(refused), text).unwrap();
        store.revoke(TicketId([5; 8])).unwrap();
        if refused != "keys" {
            assert!(store.distrust("a").unwrap());
        }
        if refused != "secrets" {
            store.rotate().unwrap();
        }
        if refused != "acl" {
            fs::write(store.path("acl"), "key:a list **\n").unwrap();
        }
        let after = rules_after_check(&access).await;
        assert!(access.problem().unwrap().contains(refused), "{:?}", access.problem());
        assert!(after.revoked.contains(&TicketId([5; 8])), "{refused}");
        assert_eq!(
            after.revoked.contains(&TicketId([1; 8])),
            refused == "revoked",
            "of a wrong file the good lines"
        );
        assert_eq!(after.revoked_keys.contains(&Fingerprint([1; 32])), refused != "keys", "{refused}");
        assert_eq!(after.secrets != before.secrets, refused != "secrets", "{refused}");
        assert_eq!(after.acl != before.acl, refused != "acl", "{refused}");
        let revoked = format!("{} a\nrevoked {}\nhalf a line", Fingerprint([1; 32]), Fingerprint([2; 32]));
        fs::write(store.path("keys"), revoked).unwrap();
        assert!(rules_after_check(&access).await.revoked_keys.contains(&Fingerprint([2; 32])), "{refused}");
        fs::set_permissions(store.path("keys"), fs::Permissions::from_mode(0o666)).unwrap();
        let kept = rules_after_check(&access).await;
        assert!(kept.revoked_keys.contains(&Fingerprint([2; 32])), "also when it cannot be read at all");
    }
}

#[test]
fn two_first_starts_make_one_secret() {
    for _ in 0..20 {
        let dir = tempfile::tempdir().unwrap();
        let barrier = Barrier::new(4);
        let start = || {
            barrier.wait();
            AccessStore::open(dir.path()).unwrap().secrets().unwrap()
        };
        let started: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(start)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(started.iter().all(|secrets| *secrets == started[0]), "all use the first one's");
    }
}

#[test]
fn files_that_others_can_change_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    for file in FILES.into_iter().chain(["issued"]) {
        let before = fs::read(store.path(file)).ok();
        if before.is_none() {
            fs::write(store.path(file), "").unwrap();
        }
        let read = || store.rules().and_then(|_| store.issued());
        let may = |mode| fs::set_permissions(store.path(file), fs::Permissions::from_mode(mode)).unwrap();
        may(0o666);
        let error = read().unwrap_err().to_string();
        assert!(error.contains(file) && error.contains("everybody can write it"), "{error}");
        may(0o644);
        assert!(read().is_ok());
        fs::remove_file(store.path(file)).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            store.path(file),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        let error = read().unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "nobody waits for a writer: {error}");
        fs::remove_file(store.path(file)).unwrap();
        if let Some(before) = before {
            fs::write(store.path(file), before).unwrap();
        }
    }
}

/// Goal: no file that is lost, emptied or truncated changes the rules of a running server, which reports it; a file
/// that is empty on purpose does. Method: each file, each of these, and a check after each.
#[tokio::test(start_paused = true)]
async fn lost_files_do_not_change_the_rules() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let (one, two) = (Fingerprint([1; 32]), Fingerprint([2; 32]));
    let pem = rcgen::generate_simple_self_signed(["a".to_owned()]).unwrap().cert.pem();
    let revoked = TicketId([1; 8]);
    for (file, text) in [
        ("revoked", format!("{revoked}\n")),
        ("keys", format!("{one} a\n{two} b\n")),
        ("ca.pem", pem),
        ("acl", "key:a list kv/*\nuid:1 publish kv/ab\n".into()),
    ] {
        fs::write(store.path(file), text).unwrap();
    }
    let access = store.watch_changes().unwrap();
    let before = access.rules();
    for file in ["revoked", "keys", "ca.pem", "acl"] {
        let text = fs::read_to_string(store.path(file)).unwrap();
        let cut = &text[..text.len() - 2];
        for lost in [None, Some(""), Some("\n"), Some(cut)] {
            match lost {
                None => fs::remove_file(store.path(file)).unwrap(),
                Some(lost) => fs::write(store.path(file), lost).unwrap(),
            }
            assert_eq!(rules_after_check(&access).await, before, "{file} {lost:?}");
            let problem = access.problem().unwrap();
            assert!(problem.contains(file), "{problem}");
            fs::write(store.path(file), &text).unwrap();
            rules_after_check(&access).await;
            assert_eq!((access.rules(), access.problem()), (Arc::clone(&before), None));
        }
    }
    for file in ["revoked", "keys", "ca.pem", "acl"] {
        fs::write(store.path(file), "# nobody\n").unwrap();
        rules_after_check(&access).await;
        assert_eq!(access.problem(), None, "{file}");
    }
    let after = access.rules();
    assert!(after.keys.is_empty() && after.authorities == Default::default());
    assert_eq!(after.revoked_keys, [one, two].into(), "they are refused even with a token");
    assert!(after.revoked.contains(&revoked));
    assert!(!after.acl.may_publish(2, &Topic::new("kv/ab").unwrap()));
}

#[test]
fn uses_and_tickets_are_kept_within_bounds() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let used = |from: u64| (from..from + USES_MAX as u64).map(|n| (TicketId(n.to_be_bytes()), n)).collect();
    store.note_uses(&used(0)).unwrap();
    store.note_uses(&used(5)).unwrap();
    let kept = store.used().unwrap();
    assert_eq!((kept.len(), kept.values().min().copied()), (USES_MAX, Some(5)));
    let (claims, _) = store.issue("", vec![], None).unwrap();
    let line = issued::to_line(&IssuedTicket { claims, issued_s: 0, secret: None });
    fs::write(store.path("issued"), format!("{line}\n").repeat(ISSUED_MAX)).unwrap();
    assert!(matches!(store.issue("", vec![], None), Err(AccessStoreError::Unfit(_))));
}

#[test]
fn errors_name_broken_files_without_their_content() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let secrets = fs::read_to_string(store.path("secrets")).unwrap();
    for (file, text, expected) in [
        ("secrets", secrets[1..].to_owned(), "line 1 is invalid"),
        ("secrets", String::new(), "has no secret"),
        ("revoked", "\n# all\nnonsense".into(), "line 3 is invalid"),
        ("keys", "sha256:00 a".into(), "line 1 is invalid"),
        ("acl", "key:a read **".into(), "line 1: there is no verb"),
        ("ca.pem", "nonsense".into(), "contains no certificate"),
    ] {
        let before = fs::read(store.path(file)).ok();
        fs::write(store.path(file), &text).unwrap();
        let error = store.rules().unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(file), "{error}");
        assert!(text.len() < 20 || !error.contains(&text[10..20]), "{error}");
        match before {
            Some(before) => fs::write(store.path(file), before).unwrap(),
            None => fs::remove_file(store.path(file)).unwrap(),
        }
    }
    assert!(store.rules().is_ok());
}

/// Invalid rules change nothing; valid ones apply at the next check, also after an exchanged link.
#[tokio::test(start_paused = true)]
async fn changed_rules_apply_at_the_next_check() {
    let dir = tempfile::tempdir().unwrap();
    let store = AccessStore::open(dir.path()).unwrap();
    let access = store.watch_changes().unwrap();
    let key = Fingerprint([5; 32]);
    let topic = Topic::new("kv/a").unwrap();
    let looked = || async {
        let rules = rules_after_check(&access).await;
        let name = rules.keys.get(&key).map(|name| format!("key:{name}"));
        name.is_some_and(|name| rules.acl.decide(&name, Verb::List, &topic) != Decision::Denied)
    };
    assert!(!looked().await);
    let elsewhere = dir.path().join("elsewhere");
    fs::write(&elsewhere, "key:gpu-* list kv/*\n").unwrap();
    std::os::unix::fs::symlink(&elsewhere, store.path("acl")).unwrap();
    fs::write(store.path("keys"), format!("{key} gpu-1\n")).unwrap();
    assert!(looked().await);
    fs::write(&elsewhere, "nonsense").unwrap();
    assert!(looked().await, "the previous rules stay");
    fs::write(&elsewhere, "# nobody\n").unwrap();
    assert!(!looked().await);
}
