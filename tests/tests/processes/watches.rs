//! Files that are replaced while they are served.

use crate::{
    admin::{admin_address, get_until},
    files,
    held_transfer::{HeldTransfer, MODEL_BYTES},
    http::Response,
};
use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};
use tensor_relay_tests::processes::{ANY_PORT, Home, ON_HOST, Process, Serving, Signal, wait_until};

/// The watch interval of servers in these tests.
const INTERVAL: &str = "--watch-interval=0.05";

/// A watched file `w` of incompressible bytes, its server, and a subscriber that has received its first version.
struct WatchedFile {
    home: Home,
    server: Serving,
    follower: Process,
}

impl WatchedFile {
    fn new(bytes: usize, more_args: &[&str]) -> Self {
        let home = Home::new();
        files::write_noise(&home.path("w"), bytes, 1);
        let server = home.serve(&[&["--topic=w=w", "--watch", INTERVAL], more_args].concat());
        let mut follower = home.start(&["subscribe", server.ticket("w"), "--out=out", "--json"]);
        follower.wait_for_stdout(r#""version":1"#);
        Self { home, server, follower }
    }

    fn replace(&self, bytes: usize, seed: u64) {
        files::replace(&self.home.path("w"), |path| files::write_noise(path, bytes, seed));
    }

    /// Waits until the subscriber has version `last`, and ends both processes. Checks that the subscriber received
    /// exactly versions 1 to `last`, and that its file equals the served one.
    fn finish_at(mut self, last: u64) {
        self.follower.wait_for_stdout(&format!(r#""version":{last}"#));
        files::assert_same(&self.home.path("w"), &self.home.path("out/w.safetensors"));
        let events = self.follower.signal_and_wait(Signal::TERM).expect_code(143).events();
        let versions: Vec<_> = events.iter().map(|event| event["version"].as_u64().unwrap()).collect();
        assert_eq!(versions, (1..=last).collect::<Vec<_>>());
        self.server.process.signal_and_wait(Signal::TERM).expect_code(0);
    }
}

/// Goal: a file that is replaced by other content becomes the next version; one replaced by the same content does not.
/// Method: replace the file by the same content, then by other content; staged and borrowed.
#[test]
fn a_replaced_file_is_the_next_version() {
    for hold in ["--hold=stage", "--hold=borrow"] {
        let mut watched = WatchedFile::new(1000, &[hold]);
        watched.server.process.wait_for_stderr("read in");
        watched.replace(1000, 1);
        watched.server.process.wait_for_stderr("read in"); // The server has read the file; its content is unchanged.
        watched.replace(2000, 2);
        watched.server.process.wait_for_stdout(r#""event":"published""#);
        watched.follower.wait_for_stdout(r#""version":2"#);
        watched.replace(2000, 3);
        watched.finish_at(3);
    }
}

/// Goal: for a file that changes little, the server sends deltas from the third version on; a subscriber that retains
/// no bases gets complete versions. Method: change one byte in a thousand, three times, with a subscriber that retains
/// bases and one that does not.
#[test]
fn small_changes_are_sent_as_deltas() {
    const BYTES: usize = 8 << 20;
    let mut watched = WatchedFile::new(BYTES, &["--keep-versions=2"]); // On a GPU, bases are retained versions.
    let ticket = watched.server.ticket("w").to_owned();
    let args = ["subscribe", &ticket, "--out=whole", "--json", "--base-mem=0"];
    let mut without_bases = watched.home.start(&args);
    without_bases.wait_for_stdout(r#""version":1"#);
    for version in 2..=4 {
        let path = watched.home.path("w");
        let mut bytes = fs::read(&path).unwrap();
        let (end, step) = (bytes.len(), 1000 + version);
        for at in (end - BYTES..end).step_by(step) {
            bytes[at] ^= 1;
        }
        files::replace(&path, |path| fs::write(path, &bytes).unwrap());
        let line = watched.follower.wait_for_stdout(&format!(r#""version":{version}"#));
        let event: serde_json::Value = serde_json::from_str(&line).unwrap();
        let (wire, deltas) = (event["wire_bytes"].as_u64().unwrap(), &event["codecs"]["sparse"]);
        if version == 2 {
            assert!(deltas.is_null() && event["wire_bytes"] == event["payload_bytes"], "{line}");
        } else {
            assert!(wire < BYTES as u64 / 50 && deltas["wire_bytes"] == wire, "{line}");
            assert_eq!(deltas["payload_bytes"], event["payload_bytes"], "{line}");
        }
        let line = without_bases.wait_for_stdout(&format!(r#""version":{version}"#));
        let event: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert!(
            event["codecs"]["sparse"].is_null() && event["wire_bytes"] == event["payload_bytes"],
            "{line}"
        );
    }
    without_bases.signal_and_wait(Signal::TERM).expect_code(143);
    files::assert_same(&watched.home.path("w"), &watched.home.path("out/w.safetensors"));
    watched.follower.signal_and_wait(Signal::TERM).expect_code(143);
    watched.server.process.signal_and_wait(Signal::TERM).expect_code(0);
}

/// Goal: a file that is still being written is not published, however long that takes. Method: write a file in place,
/// slowly, with some pauses longer than several watch intervals.
#[test]
fn an_incomplete_file_is_not_published() {
    let home = Home::new();
    let (served, next) = (home.path("w.safetensors"), home.path("next.safetensors"));
    files::write_noise(&served, 100_000, 1);
    files::write_noise(&next, 100_000, 2);
    let contents = fs::read(&next).unwrap();
    let server = home.serve(&["--topic=w=w.safetensors", "--watch", INTERVAL]);
    let mut follower = home.start(&["subscribe", server.ticket("w"), "--out=out", "--json"]);
    follower.wait_for_stdout(r#""version":1"#);
    let mut file = File::create(&served).unwrap();
    for (part, pause) in contents.chunks(contents.len() / 6 + 1).zip([30, 60, 250, 30, 250, 0]) {
        file.write_all(part).unwrap();
        thread::sleep(Duration::from_millis(pause));
    }
    let line = follower.wait_for_stdout("version");
    assert!(line.contains(r#""version":2"#), "{line}");
    assert!(fs::read(home.path("out/w.safetensors")).unwrap() == contents);
    follower.signal_and_wait(Signal::TERM).expect_code(143);
    let output = server.process.signal_and_wait(Signal::TERM).expect_code(0).out;
    assert_eq!(output.matches("published").count(), 1, "{output}");
}

/// A held transfer of a borrowed, watched file. It may be held for long on a busy machine.
fn patient_transfer() -> HeldTransfer {
    let home = Home::new().with_idle_timeout(60_000);
    HeldTransfer::in_home(home, &["--hold=borrow", "--watch", INTERVAL], &["--once", "--json"])
}

/// Goal: the transfer of a borrowed file that is replaced by renaming is completed. Method: rename another file over it
/// while the proxy holds.
#[test]
fn the_transfer_of_a_replaced_file_completes() {
    let HeldTransfer { home, proxy, mut server, subscriber } = patient_transfer();
    fs::hard_link(home.path("w"), home.path("old")).unwrap();
    files::replace(&home.path("w"), |path| files::write_noise(path, 1000, 2));
    server.process.wait_for_stdout(r#""version":2"#);
    proxy.release();
    assert_eq!(subscriber.wait().expect_code(0).json()["version"], 1);
    files::assert_same(&home.path("old"), &home.path("out/w.safetensors"));
}

/// Goal: a borrowed file that is overwritten in place is never received as a mixture of old and new bytes: both ends
/// report the change, and the new content is the next version. Method: overwrite the file while the proxy holds, with
/// other bytes of the same size.
#[test]
fn an_overwritten_file_gives_no_torn_version() {
    let HeldTransfer { home, proxy, mut server, subscriber } = patient_transfer();
    files::write_noise(&home.path("w"), MODEL_BYTES, 2);
    proxy.release();
    let line = server.process.wait_for_stderr("cannot be read any more");
    assert!(line.contains("w changed"), "{line}");
    let ended = subscriber.wait().expect_code(0);
    assert!(ended.err.contains("aborted a version: its publisher wrote to or freed"), "{ended:?}");
    assert_eq!(ended.json()["version"], 2, "{ended:?}");
    files::assert_same(&home.path("w"), &home.path("out/w.safetensors"));
}

/// Goal: the version of a deleted file stays available, also of a borrowed one, because an open file remains readable.
/// The server reports the deletion; a new file is the next version. Method: move the file away, subscribe, and create
/// another file.
#[test]
fn a_deleted_file_stays_available() {
    for hold in ["--hold=stage", "--hold=borrow"] {
        let mut watched = WatchedFile::new(1000, &[hold]);
        fs::rename(watched.home.path("w"), watched.home.path("gone")).unwrap();
        watched
            .server
            .process
            .wait_for_stderr("there is nothing to serve at w any more");
        let late = ["subscribe", watched.server.ticket("w"), "--once", "--out=late"];
        watched.home.run(&late).expect_code(0);
        files::assert_same(&watched.home.path("gone"), &watched.home.path("late/w.safetensors"));
        watched.replace(3000, 2);
        watched.finish_at(2);
    }
}

/// Goal: an invalid replacement is not published: the previous version stays on offer, the reason is reported, and the
/// next valid file is the next version. Method: garbage, a truncated file, then a valid one.
#[test]
fn an_invalid_replacement_is_refused() {
    let mut watched = WatchedFile::new(1000, &[]);
    let valid = fs::read(watched.home.path("w")).unwrap();
    for (broken, cause) in [(&b"rubbish"[..], "header"), (&valid[..valid.len() / 2], "cut off")] {
        files::replace(&watched.home.path("w"), |path| fs::write(path, broken).unwrap());
        let line = watched.server.process.wait_for_stderr("cannot be published");
        assert!(line.contains("the previous version stays on offer") && line.contains(cause), "{line}");
        assert_eq!(watched.home.list(&watched.server)[0]["version"], 1);
    }
    watched.replace(4000, 2);
    watched.finish_at(2);
}

/// Goal: a failure to publish watched files is in the status and the metrics while the earlier version stays on offer,
/// and the files are not read again without a pause. Method: delete the state directory, so that no number can be
/// recorded; five attempts take longer than the waits between them.
#[test]
fn a_failure_to_publish_is_reported_and_tried_again_with_pauses() {
    let mut watched = WatchedFile::new(1000, &["--state-dir=keys", "--admin=127.0.0.1:0"]);
    let admin = admin_address(&watched.server);
    let problem = |response: &Response| response.json()["topics"][0]["publish_problem"].clone();
    assert!(problem(&Response::get(&admin, "/status", &[])).is_null());
    watched.server.process.wait_for_stderr("read in");
    fs::remove_dir_all(watched.home.path("keys")).unwrap();
    watched.replace(1000, 2);
    watched.server.process.wait_for_stderr("read in");
    let began = Instant::now();
    (0..4).for_each(|_| drop(watched.server.process.wait_for_stderr("read in")));
    assert!(began.elapsed() >= Duration::from_millis(50 + 100 + 200 + 400), "{:?}", began.elapsed());
    let status = get_until(&admin, "/status", |response| !problem(response).is_null());
    assert!(problem(&status).as_str().unwrap().contains("topics.lock"), "{status:?}");
    let metrics = Response::get(&admin, "/metrics", &[]).expect_code(200);
    assert!(metrics.body.contains("tensor_relay_topic_publish_problem{topic=\"w\"} 1"), "{metrics:?}");
    Response::get(&admin, "/readyz", &[]).expect_code(200);
}

/// Goal: when a state directory is restored from an older copy, subscribers that hold newer versions receive what the
/// server has, and both ends say so. Method: both modes; copy the state directory at version 1, replace the file twice,
/// kill the server, restore the copy, and start the server with other content.
#[test]
fn a_restored_state_directory_leaves_no_subscriber_behind() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let args = ["--topic=w=w", "--watch", INTERVAL, "--state-dir=keys", "--keep-versions=4"];
    let server = home.serve(&args);
    let ticket = server.ticket("w").to_owned();
    let mut latest = home.start(&["subscribe", &ticket, "--out=latest", "--json"]);
    let every = ["subscribe", &ticket, "--out=every", "--json", "--mode=every", "--on-gap=continue"];
    let mut every = home.start(&every);
    for version in 1..=3 {
        let line = format!(r#""version":{version}"#);
        latest.wait_for_stdout(&line);
        every.wait_for_stdout(&line);
        match version {
            1 => copy_folder(&home.path("keys"), &home.path("backup")),
            3 => break,
            _ => {}
        }
        files::replace(&home.path("w"), |path| files::write_noise(path, 1000, version + 1));
    }
    let report = server.report.clone();
    server.process.signal_and_wait(Signal::KILL);
    fs::remove_dir_all(home.path("keys")).unwrap();
    fs::rename(home.path("backup"), home.path("keys")).unwrap();
    files::replace(&home.path("w"), |path| files::write_noise(path, 1000, 9));
    let mut server = home.serve_again(&report, &args);
    let line = every.wait_for_stdout(r#""event":"gap""#);
    assert!(line.contains(r#""after":3"#) && line.contains(r#""found":2"#), "{line}");
    for (follower, folder) in [(&mut latest, "latest"), (&mut every, "every")] {
        follower.wait_for_stdout(r#""version":2"#);
        files::assert_same(&home.path("w"), &home.path(folder).join("w.safetensors"));
        follower.wait_for_stderr("it never had a version as new");
    }
    server
        .process
        .wait_for_stderr("newer version of this epoch than was ever published here");
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_folder(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}

/// Goal: a folder is replaced atomically: a version has all files of one state of the folder. Method: a link to one
/// model, then to another; then replace one shard in two steps, between which the folder is incomplete.
#[test]
fn a_folder_is_replaced_atomically() {
    let home = Home::new();
    for seed in [1, 2] {
        files::write_sharded(&home.path(&format!("model-{seed}")), seed);
    }
    let link_to = |folder: &str| {
        files::replace(&home.path("model"), |path| std::os::unix::fs::symlink(folder, path).unwrap());
    };
    link_to("model-1");
    let mut server = home.serve(&["--topic=m=model", "--watch", INTERVAL]);
    let mut follower = home.start(&["subscribe", server.ticket("m"), "--out=out", "--json"]);
    follower.wait_for_stdout(r#""version":1"#);
    files::assert_same_model(&home.path("model-1"), &home.path("out/m"));
    link_to("model-2");
    follower.wait_for_stdout(r#""version":2"#);
    files::assert_same_model(&home.path("model-2"), &home.path("out/m"));
    // The server waits for a shard that is missing for a while.
    let shard = home.path("model-2").join(files::SHARDED_FILES[2]);
    fs::rename(&shard, home.path("aside")).unwrap();
    let line = server.process.wait_for_stderr("model cannot be served any more");
    assert!(line.contains(&format!("{}, which is missing", files::SHARDED_FILES[2])), "{line}");
    fs::rename(home.path("model-1").join(files::SHARDED_FILES[2]), &shard).unwrap();
    follower.wait_for_stdout(r#""version":3"#);
    files::assert_same_model(&home.path("model-2"), &home.path("out/m"));
}

/// Goal: a state directory has at most one server that watches, so no two servers publish different tensors under one
/// version; the next server can start after that one was killed. Method: a second server with the same state directory,
/// with and without --watch, and one with another state directory; then kill the first server and start another.
#[test]
fn a_state_directory_has_one_watching_server() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    files::write_noise(&home.path("other"), 1000, 2);
    let server = home.serve(&["--topic=w=w", "--watch", "--state-dir=keys"]);
    let again = ["serve", ANY_PORT, "--topic=w=other", "--watch", "--state-dir=keys", ON_HOST];
    home.run(&again)
        .expect_error(1, &["serve --watch", "state directory keys", "--state-dir"]);
    home.serve(&["--topic=w=other", "--state-dir=keys"]);
    home.run(&["keys", "show", "--state-dir=keys"]).expect_code(0);
    home.serve(&["--topic=w=other", "--watch", "--state-dir=others"]);
    server.process.signal_and_wait(Signal::KILL);
    home.serve(&["--topic=w=other", "--watch", "--state-dir=keys"]);
}

/// Goal: a version number that subscribers may have seen is never reused for other tensors, even if the server is
/// killed before it reports the version. Method: kill the server while version 2 waits for a reader, and start it again
/// with other content.
#[test]
fn a_version_number_is_never_reused() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let args = ["--topic=w=w", "--watch", INTERVAL, "--when-full=block", "--state-dir=keys"];
    let server = home.serve(&args);
    let every = ["subscribe", server.ticket("w"), "--mode=every", "--exec=exec sleep 60", "--json"];
    let mut reader = home.start(&every);
    reader.wait_for_stdout(r#""version":1"#);
    files::replace(&home.path("w"), |path| files::write_noise(path, 1000, 2));
    wait_until_version_2_is_in_the_ledger(&home);
    assert_eq!(home.list(&server)[0]["version"], 1, "version 2 waits for the reader");
    server.process.signal_and_wait(Signal::KILL);
    files::replace(&home.path("w"), |path| files::write_noise(path, 1000, 3));
    assert_eq!(home.serve(&args).topic("w")["version"], 3);
    reader.signal_and_wait(Signal::TERM).expect_code(143);
}

/// Goal: file generations that could not be published because a reader was slow are reported by server and subscriber.
/// Method: while version 2 waits for a reader that is busy with version 1, replace the file until the server misses a
/// generation; then let the reader continue.
#[test]
fn unpublished_generations_are_counted() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let args = ["--topic=w=w", "--watch", INTERVAL, "--when-full=block", "--state-dir=keys"];
    let mut server = home.serve(&args);
    let busy = "while [ -e w ] && [ ! -e go ]; do sleep 0.02; done";
    let mut reader = home.start(&["subscribe", server.ticket("w"), "--mode=every", "--json", "--exec", busy]);
    reader.wait_for_stdout(r#""version":1"#);
    files::replace(&home.path("w"), |path| files::write_noise(path, 1000, 2));
    wait_until_version_2_is_in_the_ledger(&home);
    let (reported, replaced) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            // Bounded, but longer than the deadline of the wait below.
            for seed in (3..1003).take_while(|_| !reported.load(Ordering::Relaxed)) {
                replaced.fetch_add(1, Ordering::Relaxed);
                files::replace(&home.path("w"), |path| files::write_noise(path, 1000, seed));
                thread::sleep(Duration::from_millis(100));
            }
        });
        server.process.wait_for_stderr("replaced before they could be published");
        reported.store(true, Ordering::Relaxed);
    });
    fs::write(home.path("go"), "").unwrap();
    let missed = |line: &str| {
        let event: serde_json::Value = serde_json::from_str(line).unwrap();
        event["missed_generations"].as_u64().unwrap()
    };
    assert_eq!(missed(&reader.wait_for_stdout(r#""version":2"#)), 0);
    let missed_count = missed(&reader.wait_for_stdout(r#""version":3"#));
    assert!((1..replaced.into_inner()).contains(&missed_count), "{missed_count}");
    assert_eq!(missed(&server.process.wait_for_stdout(r#""version":3"#)), missed_count);
    reader.wait_for_stderr("replaced on the server before they could be published");
    reader.signal_and_wait(Signal::TERM).expect_code(143);
}

/// Waits until version 2 is in the server's ledger, to which it is written before it is published.
fn wait_until_version_2_is_in_the_ledger(home: &Home) {
    let ledger = || fs::read_to_string(home.path("keys/topics.json")).unwrap();
    wait_until("version 2 is in the ledger", || ledger().contains(r#""version": 2"#));
}

/// Goal: watching many files costs few threads, and each is published when it changes. Method: more files than a
/// runtime has threads for blocking work; replace the first and the last file in turn, and count the threads after each
/// version.
#[test]
fn many_files_are_watched_by_few_threads() {
    let (home, names) = (Home::new(), (0..300).map(|number| format!("t{number}")).collect::<Vec<_>>());
    names.iter().for_each(|name| files::write_noise(&home.path(name), 100, 1));
    let topics = names.iter().map(|name| format!("--topic={name}={name}"));
    let args: Vec<String> = topics.chain(["--watch".into(), INTERVAL.into()]).collect();
    let mut server = home.serve(&args.iter().map(String::as_str).collect::<Vec<_>>());
    for seed in 2..12 {
        for name in [&names[0], &names[299]] {
            files::replace(&home.path(name), |path| files::write_noise(path, 100, seed));
            server.process.wait_for_stdout(&format!(r#""topic":"{name}","version":{seed}"#));
        }
        let threads = server.process.threads();
        assert!(threads < 100, "{threads} threads");
    }
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
}
