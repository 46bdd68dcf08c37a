//! Access control as an operator uses it: tickets, keys and the access control list.

use crate::{admin::admin_address, files, http::Response};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    SanType,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};
use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    thread,
    time::{Duration, Instant},
};
use tensor_relay_tests::processes::{Ended, Home, Process, Serving, Signal};

/// The documented time for which a session may continue after its permission is revoked.
const CLOSED_WITHIN: Duration = Duration::from_secs(10);

/// Both transports, which must obey the same rules.
const TRANSPORTS: [&str; 2] = ["--transport=quic", "--transport=tcp"];

/// A ticket created by `tickets create`.
struct CreatedTicket {
    file: String,
    id: String,
}

impl CreatedTicket {
    /// Runs `tickets create` with the ticket file `name`.
    fn new(home: &Home, server: &Serving, name: &str, args: &[&str]) -> Self {
        let address = format!("--address={}", server.listen());
        let all = [&["tickets", "create", "--ticket-file", name, &address], args].concat();
        let output = home.run(&all).expect_code(0).err;
        let id = output.split_whitespace().nth(2).unwrap().trim_end_matches(':').to_owned();
        Self { file: name.into(), id }
    }
}

/// Starts a subscriber, and waits until it has a version.
fn follow(home: &Home, ticket: &str, transport: &str) -> Process {
    let mut follower = home.start(&["subscribe", ticket, "--topic=w", "--json", transport]);
    follower.wait_for_stdout("committed");
    follower
}

/// Runs the program until it ends with exit code `code` and `text` in its output, because the server has reloaded its
/// access files.
fn run_until(home: &Home, args: &[&str], code: i32, text: &str) -> Ended {
    let deadline = Instant::now() + CLOSED_WITHIN;
    loop {
        let ended = home.run(args);
        if ended.code == Some(code) && (ended.out.contains(text) || ended.err.contains(text)) {
            return ended;
        }
        assert!(Instant::now() < deadline, "expected exit code {code} and {text:?}\n{ended:#?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Checks that the server closes a follower's session within the documented time.
fn assert_closed(follower: Process, reason: &str) {
    let since = Instant::now();
    follower.wait().expect_error(4, &[reason]);
    assert!(since.elapsed() < CLOSED_WITHIN, "{:?}", since.elapsed());
}

/// Goal: over either transport, a client without a valid ticket is refused with a reason; the server's own ticket gives
/// access to its topic; the server logs why it refuses a ticket, but no token. Method: no token, another server's
/// token, a truncated token, and tickets that have expired, were revoked, or are for other topics.
#[test]
fn invalid_tickets_are_refused() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w"]);
    let ticket = server.ticket("w").to_owned();
    let (without_token, token) = ticket.split_once("&token=").unwrap();
    let others = Home::new();
    files::write_noise(&others.path("w"), 1000, 1);
    let other = others.serve(&["--topic=w=w"]);
    let foreign = format!("{without_token}&token={}", other.ticket("w").split_once("&token=").unwrap().1);
    let narrow = CreatedTicket::new(&home, &server, "narrow", &["--topic=v/**"]);
    let expired = CreatedTicket::new(&home, &server, "expired", &["--topic=**", "--expires=1s"]);
    let revoked = CreatedTicket::new(&home, &server, "revoked", &["--topic=**"]);
    home.run(&["tickets", "revoke", &revoked.id]).expect_code(0);
    for ticket in [&expired, &revoked] {
        run_until(&home, &["list", &ticket.file], 4, "refused access");
    }
    for transport in TRANSPORTS {
        let none = "the ticket carries no token";
        let invalid = "the ticket's token is not valid there";
        for (ticket, reason) in [
            (without_token, none),
            (&foreign, invalid),
            (&format!("{without_token}&token={}", &token[..token.len() - 4]), invalid),
            (&expired.file, invalid),
            (&revoked.file, invalid),
        ] {
            for args in [&["subscribe", "--topic=w", "--out=out", "--once"][..], &["list"]] {
                let all = [args, &[ticket, transport]].concat();
                home.run(&all).expect_error(4, &["refused access", reason]);
            }
        }
        let refused = home.run(&["subscribe", &narrow.file, "--topic=w", "--once", "--out=out", transport]);
        refused.expect_error(4, &["does not allow to subscribe to this topic"]);
        assert_eq!(home.files_in("out"), [""; 0]);
        let listed = home.run(&["list", &narrow.file, "--json", transport]).expect_code(0).json();
        assert_eq!(listed["topics"].as_array().map(Vec::len), Some(0), "{listed}");
        let file = server.report["ticket_file"].as_str().unwrap();
        home.run(&["subscribe", file, "--once", "--out=in", transport]).expect_code(0);
    }
    files::assert_same(&home.path("w"), &home.path("in/w.safetensors"));
    let err = server.process.signal_and_wait(Signal::TERM).expect_code(0).err;
    assert!(err.contains("was revoked") && err.contains("has expired") && !err.contains(token), "{err}");
}

/// Goal: the session of a follower that loses its permission is closed within ten seconds; others continue. Method:
/// followers whose tickets are revoked or expire, and one whose ticket stays valid.
#[test]
fn revoked_and_expired_tickets_close_their_sessions() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w", "--watch", "--watch-interval=0.05"]);
    for (round, transport) in TRANSPORTS.into_iter().enumerate() {
        let valid = CreatedTicket::new(&home, &server, "good", &["--topic=w", "--for=somebody else"]);
        let mut unaffected = follow(&home, &valid.file, transport);
        let revoked = CreatedTicket::new(&home, &server, "revoked", &["--topic=*"]);
        let follower = follow(&home, &revoked.file, transport);
        home.run(&["tickets", "revoke", &revoked.id]).expect_code(0);
        assert_closed(follower, "access was refused");
        let expiring = CreatedTicket::new(&home, &server, "brief", &["--topic=w", "--expires=3s"]);
        assert_closed(follow(&home, &expiring.file, transport), "access was refused");
        files::replace(&home.path("w"), |path| files::write_noise(path, 1000, 10 + round as u64));
        unaffected.wait_for_stdout("committed");
        unaffected.signal_and_wait(Signal::KILL);
    }
}

/// Goal: a secret is rotated without a restart: tickets of the previous secret stay valid until the next rotation; a
/// broken file is reported and changes nothing. Method: rotate twice with two followers, with a broken list in between.
#[test]
fn secrets_are_rotated_without_a_restart() {
    let home = files::home_with_model();
    let mut server = home.serve(&["--topic=w=w"]);
    let old = CreatedTicket::new(&home, &server, "old", &["--topic=w"]);
    let old_follower = follow(&home, &old.file, TRANSPORTS[0]);
    home.run(&["tickets", "rotate"]).expect_code(0);
    let new = CreatedTicket::new(&home, &server, "new", &["--topic=w"]);
    fs::write(home.path("state/tensor-relay/access/acl"), "nonsense").unwrap();
    server.process.wait_for_stderr("the previous rules stay in force");
    home.run(&["list", &old.file]).expect_code(0);
    fs::remove_file(home.path("state/tensor-relay/access/acl")).unwrap();
    run_until(&home, &["list", &new.file], 0, ""); // With the broken list, the server did not load the new secret.
    home.run(&["list", &old.file]).expect_code(0);
    let new_follower = follow(&home, &new.file, TRANSPORTS[1]);
    home.run(&["tickets", "rotate"]).expect_code(0);
    assert_closed(old_follower, "access was refused");
    home.run(&["list", &new.file]).expect_code(0);
    new_follower.signal_and_wait(Signal::KILL);
}

/// Goal: a client with a trusted key needs no token, and has the rights of the current access control list. Method:
/// trust a key; change the list and revoke the key during a subscription; over each transport.
#[test]
fn clients_are_identified_by_keys() {
    let home = files::home_with_model();
    let mut server = home.serve(&["--topic=w=w"]);
    let without_token = server.ticket("w").split_once("&token=").unwrap().0.to_owned();
    let created = home
        .run(&["keys", "create", "--state-dir=client", "--json"])
        .expect_code(0)
        .json();
    let (key, identity) = (created["key"].as_str().unwrap(), "--identity=client/identity.key");
    let acl = home.path("state/tensor-relay/access/acl");
    for transport in TRANSPORTS {
        let follow_args = ["subscribe", &without_token, "--json", identity, transport];
        let once_args = [&follow_args[..], &["--once"]].concat();
        home.run(&follow_args).expect_error(4, &["refused access"]);
        home.run(&["keys", "trust", key, "gpu-1"]).expect_code(0);
        server.process.wait_for_stderr("access was refused");
        run_until(&home, &follow_args, 4, "does not allow to subscribe");
        let check = ["acl", "check", "key:gpu-1", "w", "subscribe"];
        assert_eq!(home.run(&check).expect_code(4).out, "denied: no line of the list allows it\n");
        fs::write(&acl, "# workers\nkey:gpu-* list,subscribe w\n").unwrap();
        let allowed = "allowed: line 2 of the list allows it: key:gpu-* list,subscribe w\n";
        assert_eq!(home.run(&check).expect_code(0).out, allowed);
        run_until(&home, &once_args, 0, "");
        let mut follower = home.start(&follow_args);
        follower.wait_for_stdout("committed");
        fs::write(&acl, "# nobody\n").unwrap();
        assert_closed(follower, "does not allow to subscribe");
        fs::write(&acl, "key:gpu-1 subscribe **\n").unwrap();
        run_until(&home, &once_args, 0, "");
        let mut follower = home.start(&follow_args);
        follower.wait_for_stdout("committed");
        let listed = home
            .run(&["list", &without_token, "--json", identity, transport])
            .expect_code(0)
            .json();
        assert_eq!(
            listed["topics"].as_array().map(Vec::len),
            Some(0),
            "the verb `list` was not granted: {listed}"
        );
        home.run(&["keys", "revoke", "gpu-1"]).expect_code(0);
        assert_closed(follower, "access was refused");
        fs::write(&acl, "# nobody\n").unwrap();
    }
}

/// Goal: whatever else is wrong in the access files, what an operator revokes is revoked at a running server within
/// ten seconds, and the commands name the files that it does not follow. Method: hand edits without a line end, with
/// the line ends of another system and with wrong lines; then revoke a ticket and a key, narrow the list, and rotate
/// twice, with a follower for each; restart.
#[test]
fn revocations_take_effect_whatever_other_files_hold() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w"]);
    let access = home.path("state/tensor-relay/access");
    let [early, late] =
        ["early", "late"].map(|name| CreatedTicket::new(&home, &server, name, &["--topic=w"]));
    let without_token = server.ticket("w").split_once("&token=").unwrap().0.to_owned();
    for name in ["gpu-1", "gpu-2"] {
        let (dir, identity) = (format!("--state-dir={name}"), format!("{name}/identity.key"));
        let created = home.run(&["keys", "create", &dir, "--json"]).expect_code(0).json();
        home.run(&["keys", "trust", created["key"].as_str().unwrap(), name])
            .expect_code(0);
        assert!(home.path(&identity).exists());
    }
    fs::write(access.join("acl"), "key:gpu-1 subscribe w\nkey:gpu-2 subscribe w\n").unwrap();
    let follow_with = |key: &str| {
        let identity = format!("--identity={key}/identity.key");
        run_until(&home, &["subscribe", &without_token, "--once", &identity], 0, "");
        let mut follower = home.start(&["subscribe", &without_token, "--json", &identity]);
        follower.wait_for_stdout("committed");
        follower
    };
    let followers = [follow(&home, &early.file, TRANSPORTS[0]), follow(&home, &late.file, TRANSPORTS[1])];
    let [by_early, by_late] = followers;
    let [by_first_key, by_second_key] = ["gpu-1", "gpu-2"].map(follow_with);

    fs::write(access.join("revoked"), format!("{}\r\n{}", "0a".repeat(8), "0b".repeat(8))).unwrap();
    let keys = fs::read_to_string(access.join("keys")).unwrap();
    fs::write(access.join("keys"), keys.trim_end()).unwrap();
    fs::write(access.join("acl"), "key:gpu-1 subscribe w\nkey:gpu-2 subscribe w").unwrap();
    let revoked = home.run(&["tickets", "revoke", &early.id]).expect_code(0);
    assert!(revoked.err.contains("access/acl: its last line has no line end"), "{}", revoked.err);
    assert_closed(by_early, "access was refused");
    let ids = [&"0a".repeat(8), &"0b".repeat(8), &early.id].map(|id| format!("{id}\n"));
    assert_eq!(fs::read_to_string(access.join("revoked")).unwrap(), ids.concat());
    home.run(&["keys", "revoke", "gpu-1"]).expect_code(0);
    assert_closed(by_first_key, "access was refused");
    fs::write(access.join("acl"), "").unwrap();
    home.run(&["tickets", "rotate"]).expect_code(0);
    home.run(&["tickets", "rotate"]).expect_code(0);
    assert_closed(by_late, "access was refused");
    fs::write(access.join("revoked"), format!("{}nonsense\n", ids.concat())).unwrap();
    fs::write(access.join("acl"), "key:gpu-1 subscribe w\n").unwrap();
    assert_closed(by_second_key, "does not allow to subscribe");
    let wrong = ["access/revoked: line 4 is invalid"];
    home.run(&["acl", "check", "key:gpu-2", "w", "subscribe"])
        .expect_error(1, &wrong);
    drop(server);
    home.run(&["serve", "--topic=w=w"]).expect_error(1, &wrong);
}

/// Goal: a trusted key is enough for `list` and `doctor` over both transports; a client with a revoked key is refused
/// even with a valid token; the token alone is still valid. Method: one client with both, before and after the
/// revocation, and a restart of the server.
#[test]
fn a_revoked_key_is_refused_despite_a_token() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w"]);
    let created = home
        .run(&["keys", "create", "--state-dir=client", "--json"])
        .expect_code(0)
        .json();
    let (key, identity) = (created["key"].as_str().unwrap(), "--identity=client/identity.key");
    home.run(&["keys", "trust", key, "gpu-1"]).expect_code(0);
    fs::write(home.path("state/tensor-relay/access/acl"), "key:gpu-1 list,subscribe **\n").unwrap();
    let ticket = server.ticket("w").to_owned();
    let without_token = ticket.split_once("&token=").unwrap().0;
    run_until(&home, &["subscribe", without_token, "--once", identity], 0, "");
    let mut follower = home.start(&["subscribe", &ticket, "--json", identity]);
    follower.wait_for_stdout("committed");
    let listed = home.run(&["list", without_token, "--json", identity]).expect_code(0).json();
    assert!(listed["unreachable_over"].is_null(), "the key is used over both transports: {listed}");
    let diagnosis = home.run(&["doctor", without_token, "--json", identity]).json();
    for name in ["server over UDP", "server over TCP"] {
        let finding = diagnosis["findings"]
            .as_array()
            .unwrap()
            .iter()
            .find(|finding| finding["name"] == name);
        assert_eq!(finding.unwrap()["state"], "ok", "{diagnosis}");
    }
    home.run(&["keys", "revoke", "gpu-1"]).expect_code(0);
    assert_closed(follower, "access was refused");
    drop(server);
    let server = home.serve(&["--topic=w=w"]);
    for transport in TRANSPORTS {
        let ticket = server.ticket("w");
        home.run(&["list", ticket, identity, transport])
            .expect_error(4, &["refused access"]);
        home.run(&["list", ticket, transport]).expect_code(0);
    }
}

/// Goal: a client with a certificate of a trusted authority is identified by the names in it, while the authority is
/// trusted. Method: replace the authority by another during a subscription.
#[test]
fn clients_are_identified_by_certificates() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w"]);
    let without_token = server.ticket("w").split_once("&token=").unwrap().0.to_owned();
    let [ours, theirs] = ["ours", "theirs"].map(authority);
    let uri = "spiffe://cluster/serving/gpu-1";
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.subject_alt_names.push(SanType::URI(uri.try_into().unwrap()));
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, &ours).unwrap();
    fs::write(home.path("client.key"), key.serialize_pem()).unwrap();
    fs::set_permissions(home.path("client.key"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(home.path("client.pem"), certificate.pem()).unwrap();
    let access = home.path("state/tensor-relay/access");
    fs::write(access.join("acl"), format!("uri:{uri} list,subscribe **\n")).unwrap();
    for transport in TRANSPORTS {
        fs::write(access.join("ca.pem"), theirs.pem()).unwrap();
        let follow_args = [
            "subscribe",
            &without_token,
            "--json",
            "--identity=client.key",
            "--certificate=client.pem",
            transport,
        ];
        home.run(&follow_args).expect_error(4, &["refused access"]);
        fs::write(access.join("ca.pem"), ours.pem()).unwrap();
        run_until(&home, &[&follow_args[..], &["--once"]].concat(), 0, "");
        let mut follower = home.start(&follow_args);
        follower.wait_for_stdout("committed");
        fs::write(access.join("ca.pem"), theirs.pem()).unwrap();
        assert_closed(follower, "access was refused");
    }
}

fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Goal: no error shows the token of a ticket that was given in the wrong place. Method: a ticket as each kind of
/// argument of several commands.
#[test]
fn errors_do_not_show_tickets() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w"]);
    let ticket = server.ticket("w");
    let token = ticket.split_once("&token=").unwrap().1;
    for args in [
        &["list", ticket, ticket][..],
        &["list", token, ticket],
        &["subscribe", "no-ticket", "--topic", ticket],
        &["subscribe", ticket, "--codec", ticket],
        &["tickets", "revoke", ticket],
        &["tickets", "create", "--topic", ticket, "--expires", token],
        &["acl", "check", ticket, "w", "subscribe"],
        &["acl", "check", "key:a", "w", token],
        &["keys", "trust", ticket, "a"],
        &["keys", "revoke", token],
        &["serve", "--topic", ticket],
        &[ticket],
    ] {
        let output = home.run(args);
        let shown = format!("{}{}", output.out, output.err);
        let parts = (0..=token.len() - 12).map(|at| &token[at..at + 12]);
        assert!(output.err.contains("error: "), "{args:?}: {shown}");
        assert!(parts.clone().all(|part| !shown.contains(part)), "{args:?}: {shown}");
    }
}

/// Goal: files with secrets are not read from where anybody may write them, and what is said of a mode is true. Method:
/// a ticket and an admin token that can be read, changed by a group, and changed by everybody.
#[test]
fn exposed_secret_files_are_named() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w"]);
    let ticket = home.path("a.ticket");
    fs::write(&ticket, server.ticket("w")).unwrap();
    fs::write(home.path("admin.token"), "0123456789abcdef").unwrap();
    for (mode, said) in
        [(0o600, ""), (0o644, "can be read by others"), (0o660, "can be changed by its group")]
    {
        fs::set_permissions(&ticket, fs::Permissions::from_mode(mode)).unwrap();
        let listed = home.run(&["list", "a.ticket"]).expect_code(0);
        assert!(
            listed.err.contains(said) && listed.err.contains("warning") != said.is_empty(),
            "{}",
            listed.err
        );
    }
    for file in ["a.ticket", "admin.token"] {
        fs::set_permissions(home.path(file), fs::Permissions::from_mode(0o666)).unwrap();
    }
    home.run(&["list", "a.ticket"]).expect_error(2, &["everybody can write it"]);
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(home.path("a.ticket"), Some(4242), None).unwrap();
        home.run(&["list", "a.ticket"]).expect_error(2, &["everybody can write it"]);
    }
    let admin = ["serve", "--topic=w=w", "--admin=127.0.0.1:0", "--admin-token-file=admin.token"];
    home.run(&admin).expect_error(1, &["everybody can write it"]);
}

/// Goal: an operator sees which tickets exist, for whom, and whether they are used; no list shows a token. Method:
/// create, use, revoke and list two tickets.
#[test]
fn tickets_are_listed_without_tokens() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w"]);
    let one = CreatedTicket::new(&home, &server, "one", &["--topic=w", "--expires=30d", "--for=Paris"]);
    let two = CreatedTicket::new(&home, &server, "two", &["--topic=a/*", "--topic=b", "--verbs=list"]);
    home.run(&["list", &one.file]).expect_code(0);
    home.run(&["tickets", "revoke", &two.id]).expect_code(0);
    let used = || home.run(&["tickets", "list"]).expect_code(0).out.contains("used ");
    let deadline = Instant::now() + CLOSED_WITHIN;
    while !used() || home.run(&["tickets", "list"]).expect_code(0).out.contains("valid, never") {
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_millis(200));
    }
    let listed = home.run(&["tickets", "list"]).expect_code(0).out;
    let lines: Vec<&str> = listed.lines().collect();
    assert!(lines[0].starts_with(&format!("{}  valid, used ", one.id)), "{listed}");
    assert!(lines[0].ends_with("list,subscribe w, expires in 29d, for Paris"), "{listed}");
    assert_eq!(lines[1], format!("{}  revoked, never used: list a/*; list b", two.id));
    let shown = home.run(&["tickets", "show", &one.file]).expect_code(0).out;
    assert!(shown.contains("&token=(hidden)") && shown.ends_with("valid\n"), "{shown}");
    let revoked = home.run(&["tickets", "show", &two.file]).expect_code(0).out;
    assert!(revoked.contains("not valid: its ticket") && revoked.contains("was revoked"), "{revoked}");
    let token = fs::read_to_string(home.path("one")).unwrap();
    let token = token.trim().split_once("&token=").unwrap().1;
    for text in [&listed, &shown, &home.run(&["tickets", "list", "--json"]).expect_code(0).out] {
        assert!(!text.contains(token), "{text}");
    }
    let check = home
        .run(&["acl", "check", &format!("ticket:{}", one.id), "w", "subscribe"])
        .expect_code(0);
    assert_eq!(check.out, "allowed: the ticket grants list,subscribe w\n");
    home.run(&["tickets", "revoke", "nonsense"])
        .expect_error(2, &["16 hexadecimal digits"]);
    home.run(&["tickets", "create", "--topic=w", "--expires=soon"])
        .expect_error(2, &["as in 30d"]);
}

/// Goal: once the list has `uid:` lines, only the users in them may publish through the socket. Method: publish before,
/// with a list that names another user, and with one that names this one.
#[test]
fn the_publish_socket_obeys_the_acl() {
    let home = files::home_with_model();
    let server = home.serve(&["--publish-socket=socket"]);
    let publish = ["publish", "socket", "kv/a", "w"];
    home.run(&publish).expect_code(0);
    let acl = home.path("state/tensor-relay/access/acl");
    let uid = fs::metadata(home.path("w"))
        .map(|found| std::os::unix::fs::MetadataExt::uid(&found))
        .unwrap();
    fs::write(&acl, "uid:4242 publish kv/*\n").unwrap();
    let refused = run_until(&home, &publish, 4, "does not let user");
    refused.expect_error(4, &["publish kv/a"]);
    fs::write(&acl, format!("uid:{uid} publish kv/*\n")).unwrap();
    run_until(&home, &publish, 0, "");
    home.run(&["publish", "socket", "other", "w"])
        .expect_error(4, &["does not let user"]);
    drop(server);
    let mut server = home.serve(&["--publish-socket=socket", "--open", "-v"]);
    home.run(&publish).expect_code(0);
    for _ in 0..2 {
        home.run(&["publish", "socket", "other", "w"])
            .expect_error(4, &["does not let user"]);
    }
    fs::write(&acl, "uid:4242 publish kv/*\n").unwrap();
    server.process.wait_for_stderr("The access rules were replaced");
    home.run(&publish).expect_error(4, &["does not let user"]);
    home.run(&["list", server.report["ticket_file"].as_str().unwrap()])
        .expect_code(0);
    let err = server.process.signal_and_wait(Signal::TERM).expect_code(0).err;
    assert_eq!(err.matches("A publish was refused").count(), 1, "at most one line a minute: {err}");
}

/// Goal: a user that loses the permission to publish while its version waits for readers does not publish it. Method:
/// a list without the user, while a reader is busy with the version before; then the reader goes.
#[test]
fn a_waiting_publish_obeys_the_acl() {
    let home = files::home_with_model();
    let mut server = home.serve(&["--publish-socket=socket", "--when-full=block", "--publish-timeout=0.1"]);
    let publish = ["publish", "socket", "kv/a", "w", "--timeout=600"];
    home.run(&publish).expect_code(0);
    let ticket = home.create_ticket_for_all(&server);
    let every = ["subscribe", &ticket, "--topic=kv/a", "--mode=every", "--exec=exec sleep 60", "--json"];
    let mut reader = home.start(&every);
    reader.wait_for_stdout(r#""version":1"#);
    let waiting = home.start(&publish);
    server.process.wait_for_stderr("waits for 1 reader");
    fs::write(home.path("state/tensor-relay/access/acl"), "uid:4242 publish kv/*\n").unwrap();
    waiting.wait().expect_error(4, &["does not let user", "publish kv/a"]);
    reader.signal_and_wait(Signal::TERM).expect_code(143);
    assert_eq!(home.list(&server)[0]["version"], 1);
}

/// Goal: a command says what its revocation does not do, and none makes a secret in place of a lost one. Method: revoke
/// a made and an unknown ticket; lose the secret, run each command, and start again.
#[test]
fn commands_do_not_hide_what_is_missing() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w"]);
    let [one, two] = ["one", "two"].map(|name| CreatedTicket::new(&home, &server, name, &["--topic=w"]));
    let (unknown, first) = ("no ticket with this ID", "listed no other ticket");
    let revoked = home.run(&["tickets", "revoke", &one.id]).expect_code(0).err;
    assert!(revoked.contains(first) && !revoked.contains(unknown), "{revoked}");
    let revoked = home.run(&["tickets", "revoke", &"0a".repeat(8)]).expect_code(0).err;
    assert!(!revoked.contains(first) && revoked.contains(unknown), "{revoked}");
    drop(server);
    let secrets = home.path("state/tensor-relay/access/secrets");
    fs::remove_file(&secrets).unwrap();
    let check = format!("ticket:{}", two.id);
    let missing = "access/secrets: it is missing";
    for (args, code, said) in [
        (&["tickets", "list"][..], 0, "secret lost"),
        (&["tickets", "show", &two.file], 0, "not valid: the token was made with another secret"),
        (&["acl", "check", &check, "w", "subscribe"], 4, "denied: the token was made with another secret"),
        (&["tickets", "revoke", &one.id], 0, missing),
        (&["keys", "list"], 0, missing),
        (&["tickets", "rotate"], 1, missing),
        (&["tickets", "create", "--topic=w", "--address=a:1"], 1, missing),
    ] {
        let output = home.run(args).expect_code(code);
        assert!(output.err.contains(missing), "{args:?}: {}", output.err);
        assert!(format!("{}{}", output.out, output.err).contains(said), "{args:?}: {}", output.out);
        assert!(!secrets.exists(), "{args:?}");
    }
    let _server = home.serve(&["--topic=w=w"]);
    let listed = home.run(&["tickets", "list"]).expect_code(0).out;
    assert!(!listed.contains("valid,"), "the new secret is not taken for the lost one: {listed}");
}

/// Goal: silent connections do not block others: clients at the same and at other addresses can connect, and sessions
/// continue; handshakes of one address beyond its rate are refused. Method: more silent TCP connections than the limit,
/// from another address and from the same, during a subscription.
#[test]
fn silent_connections_block_no_client() {
    let limit = getrlimit(Resource::Nofile);
    if setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).is_err()
        || limit.maximum.is_some_and(|max| max < 4_096)
    {
        return println!("skipped: this process may not have 4096 files open");
    }
    let home = files::home_with_model();
    let server = home.serve(&[
        "--topic=w=w",
        "--watch",
        "--watch-interval=0.05",
        "--sessions=8",
        "--admin=127.0.0.1:0",
    ]);
    let mut follower = follow(&home, server.report["ticket_file"].as_str().unwrap(), TRANSPORTS[1]);
    let address: SocketAddr = server.listen().parse().unwrap();
    let mut silent = vec![];
    for (source, count) in [([127, 0, 0, 9], 3_000), ([127, 0, 0, 1], 600)] {
        for _ in 0..count {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.bind(&SocketAddr::from((source, 0)).into()).unwrap();
            // A connection that the server has evicted meanwhile may be reset.
            let _ = socket.connect_timeout(&address.into(), Duration::from_secs(5));
            silent.push(socket);
        }
        for transport in TRANSPORTS {
            home.run(&["list", server.report["ticket_file"].as_str().unwrap(), transport])
                .expect_code(0);
        }
    }
    files::replace(&home.path("w"), |path| files::write_noise(path, 1000, 7));
    follower.wait_for_stdout("committed");
    let status = Response::get(&admin_address(&server), "/status", &[]).expect_code(200).json();
    let failures = status["failures"].as_array().unwrap();
    assert!(failures.iter().any(|failure| failure["reason"] == "too_many_handshakes"), "{failures:?}");
    drop(silent);
}

/// Goal: a command on a mistyped state directory fails and leaves nothing there: a revocation would have no effect.
/// Method: every command that changes access, on a folder that does not exist and on an empty one.
#[test]
fn commands_need_the_state_directory_of_a_server() {
    let home = files::home_with_model();
    let _server = home.serve(&["--topic=w=w"]);
    let key = format!("sha256:{}", "ab".repeat(32));
    fs::create_dir(home.path("empty")).unwrap();
    for dir in ["--state-dir=mistyped", "--state-dir=empty"] {
        for command in [
            &["tickets", "revoke", "0123456789abcdef"][..],
            &["tickets", "rotate"],
            &["tickets", "create", "--topic=w", "--address=a:1"],
            &["tickets", "list"],
            &["keys", "trust", &key, "a"],
            &["keys", "revoke", "a"],
            &["keys", "list"],
            &["acl", "check", "key:a", "w", "list"],
        ] {
            home.run(&[command, &[dir]].concat())
                .expect_error(2, &["no server's state directory", "--state-dir"]);
        }
    }
    assert!(!home.path("mistyped").exists() && home.files_in("empty").is_empty());
}

/// Goal: `tickets create` knows the server's address wherever the server writes its tickets. Method: --ticket-file.
#[test]
fn tickets_are_created_beside_a_ticket_file() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w", "--ticket-file=elsewhere"]);
    let created = home.run(&["tickets", "create", "--topic=w", "--json"]).expect_code(0).json();
    let ticket = created["ticket"].as_str().unwrap();
    assert!(ticket.contains(server.listen()), "{created}");
    home.run(&["subscribe", ticket, "--once"]).expect_code(0);
}

/// Goal: expired tickets do not keep new ones from being made. Method: a list that is full of them but for one.
#[test]
fn expired_tickets_make_room() {
    let home = files::home_with_model();
    let _server = home.serve(&["--topic=w=w"]);
    let list = home.path("state/tensor-relay/access/issued");
    let line = |id: u64, expires: &str| format!("{id:016x}\t1700000000\t{expires}\tlist w\tsomebody\n");
    let full: String = (1..20_000)
        .map(|id| line(id, "1700000001"))
        .chain([line(20_000, "-")])
        .collect();
    fs::write(&list, full).unwrap();
    fs::set_permissions(&list, fs::Permissions::from_mode(0o600)).unwrap();
    home.run(&["tickets", "create", "--topic=w"]).expect_code(0);
    let kept = fs::read_to_string(&list).unwrap();
    assert_eq!(kept.lines().count(), 2, "the valid ticket and the new one");
}
