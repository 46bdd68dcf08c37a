//! Output folders: files, folders and arrays are written in their original format; kept versions; selections; and
//! commands after each version.

use crate::{
    failures::{on_small_disk, try_small_disk},
    files,
};
use serde_json::Value;
use std::{fs, path::Path};
use tensor_relay_tests::{
    processes::{ANY_PORT, Home, ON_HOST, Process, Serving, Signal},
    skip,
};

const HOLD_OPTIONS: [&str; 2] = ["--hold=stage", "--hold=borrow"];

/// Receives `topic` once into `out`; returns the event.
fn receive(home: &Home, server: &Serving, topic: &str, out: &str) -> Value {
    let args = ["subscribe", server.ticket(topic), "--once", "--json", &format!("--out={out}")];
    home.run(&args).expect_code(0).json()
}

/// The epoch of a file or folder, which depends on its format, and on names, dtypes, shapes and every byte of its
/// tensors.
fn content_epoch(home: &Home, path: &str) -> Value {
    home.serve(&[&format!("--topic=m={path}")]).topic("m")["epoch"].clone()
}

/// Goal: a model folder from Hugging Face arrives as the same folder, and the server reports the files that it does not
/// serve. Method: two shards with their index and other files, staged and borrowed; then serve the received folder.
#[test]
fn a_folder_is_mirrored_unchanged() {
    let home = Home::new();
    files::write_sharded(&home.path("model"), 1);
    let original = content_epoch(&home, "model");
    for hold in HOLD_OPTIONS {
        let mut server = home.serve(&["--topic=m=model", hold]);
        let line = server.process.wait_for_stderr("not served");
        for part in ["pytorch_model.bin (weights in another format)", ".gitattributes", "onnx"] {
            assert!(line.contains(part), "{line}");
        }
        assert!(!line.contains("README"), "{line}");
        let event = receive(&home, &server, "m", "out");
        assert_eq!((&event["path"], &event["tensors"]), (&"out/m".into(), &server.topic("m")["tensors"]));
        let mut names = home.files_in("out/m");
        names.retain(|name| !name.starts_with('.'));
        assert_eq!(names, files::SHARDED_FILES);
        files::assert_same_model(&home.path("model"), &home.path("out/m"));
        assert_eq!(content_epoch(&home, "out/m"), original);
    }
}

/// Goal: a server serves the model files of a folder, but neither other files nor targets of links that lead out of it,
/// and reports both; options allow more. Method: a folder with a key, a list of passwords and an outward link; a
/// snapshot of links in Hugging Face's cache; and a folder whose weights are an outward link.
#[test]
fn only_model_files_are_served() {
    let home = Home::new();
    files::write_sharded(&home.path("model"), 1);
    for (name, text) in [("model/id_rsa", "key"), ("model/passwords.txt", "list"), ("secret.json", "secret")]
    {
        fs::write(home.path(name), text).unwrap();
    }
    let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, home.path(name)).unwrap();
    link("../secret.json", "model/linked.json");
    link("config.json", "model/alias.json");
    let received = |args: &[&str], out: &str| {
        let mut server = home.serve(&[&["--topic=m=model"], args].concat());
        let lines =
            [server.process.wait_for_stderr("model: serves"), server.process.wait_for_stderr("not served")];
        receive(&home, &server, "m", out);
        let mut names = home.files_in(&format!("{out}/m"));
        names.retain(|name| !name.starts_with('.'));
        let reported: Vec<&str> = server.topic("m")["files"]
            .as_array()
            .unwrap()
            .iter()
            .map(|name| name.as_str().unwrap())
            .collect();
        assert!(
            names.iter().all(|name| reported.contains(&&**name)) && names.len() == reported.len(),
            "{reported:?}"
        );
        (names, lines)
    };
    let (names, [served, not_served]) = received(&[], "out");
    assert_eq!(names, [&["README.md", "alias.json"], &files::SHARDED_FILES[1..]].concat());
    assert!(served.contains("2 weight files") && served.contains("alias.json"), "{served}");
    for part in [
        "id_rsa (not a known model file)",
        "passwords.txt (",
        "linked.json (a link that leads out",
        "--all-files",
        "--follow-links",
    ] {
        assert!(not_served.contains(part), "{not_served}");
    }
    let has = |names: &[String], name: &str| names.iter().any(|found| found == name);
    let (names, _) = received(&["--all-files"], "all");
    assert!(
        has(&names, "id_rsa") && has(&names, "passwords.txt") && !has(&names, "linked.json"),
        "{names:?}"
    );
    let (names, _) = received(&["--follow-links"], "linked");
    assert!(has(&names, "linked.json") && !has(&names, "id_rsa"), "{names:?}");

    fs::create_dir_all(home.path("hub/snapshots/0123")).unwrap();
    fs::rename(home.path("model"), home.path("hub/blobs")).unwrap();
    for name in files::SHARDED_FILES {
        link(&format!("../../blobs/{name}"), &format!("hub/snapshots/0123/{name}"));
    }
    let server = home.serve(&["--topic=m=hub/snapshots/0123"]);
    receive(&home, &server, "m", "cached");
    files::assert_same_model(&home.path("hub/blobs"), &home.path("cached/m"));
    link("hub/snapshots/0123", "latest");
    receive(&home, &home.serve(&["--topic=m=latest"]), "m", "again");

    fs::create_dir(home.path("away")).unwrap();
    link("../hub/blobs/model-00001-of-00002.safetensors", "away/model.safetensors");
    let away = ["serve", ANY_PORT, "--topic=m=away"];
    home.run(&away)
        .expect_error(1, &["away/model.safetensors is a link that leads out", "--follow-links"]);
}

/// Goal: subscribers that are killed while they write do not fill the disk: each removes its predecessor's temporary
/// file, and the last leaves only the received file. Method: kill -9 as soon as there is a temporary file, until three
/// subscribers have left one.
#[test]
fn killed_subscribers_leave_at_most_one_temporary_file() {
    let home = Home::new();
    files::write_zeros(&home.path("m"), 128 << 20);
    let server = home.serve(&["--topic=m=m"]);
    let part_files = || home.files_in("out").into_iter().filter(|name| name.ends_with(".part")).count();
    let mut interrupted = 0;
    for _ in 0..30 {
        let before = home.files_in("out");
        let mut writer = home.start(&["subscribe", server.ticket("m"), "--once", "--out=out"]);
        let is_new = |name: &String| name.ends_with(".part") && !before.contains(name);
        while writer.is_running() && !home.files_in("out").iter().any(is_new) {}
        writer.signal_and_wait(Signal::KILL);
        assert!(part_files() <= 1, "{:?}", home.files_in("out"));
        interrupted += part_files();
        if interrupted == 3 {
            break;
        }
    }
    assert_eq!(interrupted, 3, "three subscribers were killed while writing");
    home.run(&["subscribe", server.ticket("m"), "--once", "--out=out"])
        .expect_code(0);
    assert_eq!(home.files_in("out"), ["m.safetensors"]);
}

/// Goal: with `--keep N` the newest N versions are kept, `latest` links to the newest, and other files are not removed.
/// Method: three versions of a file and of a folder, of which two are kept.
#[test]
fn the_newest_versions_are_kept() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    files::write_sharded(&home.path("model-1"), 1);
    std::os::unix::fs::symlink("model-1", home.path("model")).unwrap();
    let server = home.serve(&["--topic=w=w", "--topic=m=model", "--watch", "--watch-interval=0.05"]);
    let mut followers = ["w", "m"]
        .map(|topic| home.start(&["subscribe", server.ticket(topic), "--out=out", "--keep=2", "--json"]));
    for version in 1..=3_u64 {
        if version > 1 {
            files::replace(&home.path("w"), |path| files::write_noise(path, 1000, version));
            let folder = format!("model-{version}");
            files::write_sharded(&home.path(&folder), version);
            files::replace(&home.path("model"), |path| std::os::unix::fs::symlink(&folder, path).unwrap());
        }
        for follower in &mut followers {
            follower.wait_for_stdout(&format!(r#""version":{version}"#));
        }
        if version == 1 {
            fs::write(home.path("out/w/notes.txt"), "mine").unwrap();
        }
    }
    let epoch = |topic: &str| server.topic(topic)["epoch"].as_str().unwrap().to_owned();
    let name = |topic, version: u64| format!("{version:020}-{}", epoch(topic));
    // The subscriber prints a version's line before it removes old versions, but the next version's line afterwards.
    let of_file = [2, 3].map(|version| format!("{}.safetensors", name("w", version)));
    let expected = [&of_file[..], &["latest.safetensors".into(), "notes.txt".into()]].concat();
    assert_eq!(home.files_in("out/w"), expected);
    let link = |path: &str| fs::read_link(home.path(path)).unwrap();
    assert_eq!(link("out/w/latest.safetensors"), Path::new(&of_file[1]));
    files::assert_same(&home.path("w"), &home.path("out/w/latest.safetensors"));
    assert_eq!(link("out/m/latest"), Path::new(&name("m", 3)));
    files::assert_same_model(&home.path("model"), &home.path("out/m/latest"));
    assert!(
        !home.path("out/m").join(name("m", 1)).exists() && home.path("out/m").join(name("m", 2)).exists()
    );
    for follower in followers {
        follower.signal_and_wait(Signal::TERM).expect_code(143);
    }
}

/// Goal: the command of `--exec` runs after each version, and gets the version and its path. The failure of a command
/// is reported, and the subscriber continues. Method: a command that logs its environment, and fails for all versions
/// but the third; then a failing command with `--once` and without `--out`.
#[test]
fn a_command_runs_after_each_version() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let server = home.serve(&["--topic=a/w=w", "--watch", "--watch-interval=0.05"]);
    let command = "echo $TENSOR_RELAY_TOPIC $TENSOR_RELAY_VERSION $TENSOR_RELAY_EPOCH $TENSOR_RELAY_PATH >> log; \
                   exit $((3 - TENSOR_RELAY_VERSION))";
    let args = ["subscribe", server.ticket("a/w"), "--out=out", "--exec", command];
    let mut follower = home.start(&args);
    follower.wait_for_stderr("warning: the command of --exec ended with exit status: 2 for a/w");
    for version in [2, 3] {
        files::replace(&home.path("w"), |path| files::write_noise(path, 1000, version));
        follower.wait_for_stdout(&format!("version {version}"));
    }
    let ended = follower.signal_and_wait(Signal::TERM).expect_code(143);
    assert!(!ended.err.contains("exit status: 0"), "{ended:?}");
    let epoch = server.topic("a/w")["epoch"].as_str().unwrap();
    let expected = [1, 2]
        .map(|version| format!("a/w {version} {epoch} out/a/w.safetensors\n"))
        .concat();
    let log = fs::read_to_string(home.path("log")).unwrap();
    assert!(log.starts_with(&expected), "{log}");

    let without_out =
        ["subscribe", server.ticket("a/w"), "--once", "--exec", "echo [$TENSOR_RELAY_PATH]; exit 7"];
    let ended = home.run(&without_out).expect_error(8, &["exit status: 7"]);
    assert!(ended.out.ends_with("[]\n"), "{ended:?}");
}

/// Goal: a subscriber with a selection receives the selected tensors and few other bytes, and its files contain only
/// these tensors. Method: select tensors of a file by name and by glob, tensors of a folder, and nothing.
#[test]
fn only_selected_tensors_are_received() {
    let home = Home::new();
    files::write_everything(&home.path("w"));
    files::write_sharded(&home.path("model"), 1);
    let server = home.serve(&["--topic=w=w", "--topic=m=model", "--chunk-size=64KiB"]);
    let select = |topic: &str, globs: &str| {
        let select = format!("--select={globs}");
        home.run(&["subscribe", server.ticket(topic), "--once", "--out=out", "--json", &select])
    };
    let event = select("w", "scalar,layers.0.F3?").expect_code(0).json();
    assert_eq!(event["tensors"], 2);
    assert!(
        event["wire_bytes"].as_u64().unwrap() < 4 << 10,
        "`large` was received although it was not selected: {event}"
    );
    let kept = fs::read(home.path("out/w.safetensors")).unwrap();
    let saved = safetensors::SafeTensors::deserialize(&kept).unwrap();
    let mut names = saved.names();
    names.sort_unstable();
    assert_eq!(names, ["layers.0.F32", "scalar"]);
    let all = fs::read(home.path("w")).unwrap();
    let all = safetensors::SafeTensors::deserialize(&all).unwrap();
    for name in names {
        assert_eq!(saved.tensor(name).unwrap(), all.tensor(name).unwrap());
    }

    let event = select("m", "model.layers.*").expect_code(0).json();
    let wire_bytes = event["wire_bytes"].as_u64().unwrap() as usize;
    assert!(wire_bytes < files::SHARDED_BYTES * 2 / 3, "two of four tensors were selected: {event}");
    let none = select("w", "no.such.*,nor.this");
    none.expect_error(
        5,
        &["no tensor of w version 1", "matches no.such.*,nor.this of --select", "it is not saved"],
    );
    assert_eq!(fs::read(home.path("out/w.safetensors")).unwrap(), kept, "the file is not replaced");
}

/// Goal: a subscriber to boxes writes a folder whose weights are cut and whose other files are whole; wrong boxes are
/// errors that name them. Method: a quarter of each tensor of a folder; a glob without a tensor; a box beyond its tensor.
#[test]
fn boxes_are_written_as_files() {
    let home = Home::new();
    files::write_sharded(&home.path("model"), 1);
    let server = home.serve(&["--topic=m=model", "--chunk-size=64KiB"]);
    let receive = |wanted: &str| {
        let wanted = format!("--box={wanted}");
        home.run(&["subscribe", server.ticket("m"), "--once", "--out=out", "--json", &wanted])
    };
    let event = receive("**=rows:1/4").expect_code(0).json();
    let (wire_bytes, wanted_bytes) = (event["wire_bytes"].as_u64(), event["wanted_bytes"].as_u64());
    let quarter = files::SHARDED_BYTES as u64 / 4;
    assert!(wanted_bytes > Some(quarter) && wanted_bytes < Some(quarter + 4096), "{event}");
    assert!(wire_bytes < Some(quarter * 2), "{event}");
    let read = |folder: &str, file: &str| fs::read(home.path(&format!("{folder}/{file}"))).unwrap();
    for file in &files::SHARDED_FILES[2..4] {
        let (whole, cut) = (read("model", file), read("out/m", file));
        let whole = safetensors::SafeTensors::deserialize(&whole).unwrap();
        let cut = safetensors::SafeTensors::deserialize(&cut).unwrap();
        for (name, tensor) in whole.tensors() {
            let bytes = tensor.data().len() / 4;
            assert_eq!(cut.tensor(&name).unwrap().shape(), [bytes / 2]);
            assert!(cut.tensor(&name).unwrap().data() == &tensor.data()[bytes..2 * bytes], "{name}");
        }
    }
    for file in [files::SHARDED_FILES[1], files::SHARDED_FILES[5]] {
        assert!(read("model", file) == read("out/m", file), "{file} is cut");
    }
    let index: Value = serde_json::from_slice(&read("out/m", files::SHARDED_FILES[4])).unwrap();
    assert_eq!(index["metadata"]["total_size"], quarter);
    let nothing = receive("**.q_proj=rows:1/4");
    nothing.expect_error(5, &["no tensor of m version 1", "matches **.q_proj of --select or --box"]);
    let beyond = receive("lm_head=0:150001");
    beyond.expect_error(5, &["0:150001 of dimension 0", "lm_head", "[150000]", "correct the box"]);
}

/// Goal: on a disk that fills up during a series, complete versions are kept, and the version that did not fit is sent
/// again to the next subscriber. Method: receive two small versions and a large one onto a disk of 1 MiB, in mode
/// `every`; then subscribe again with a larger disk.
#[test]
fn a_full_disk_keeps_complete_versions() {
    let home = Home::new();
    fs::create_dir(home.path("out")).unwrap();
    if let Err(reason) = try_small_disk(&home) {
        return skip(format_args!("the test cannot mount a small disk here: {reason}"));
    }
    files::write_noise(&home.path("w"), 1000, 1);
    let mut server = home.serve(&["--topic=w=w", "--watch", "--watch-interval=0.05", "--keep-versions=3"]);
    for (version, bytes) in [(2, 2000), (3, 4 << 20)] {
        files::replace(&home.path("w"), |path| files::write_noise(path, bytes, version));
        server.process.wait_for_stdout(&format!(r#""version":{version}"#));
    }
    let args = ["subscribe", server.ticket("w"), "--mode=every", "--reader=r", "--keep=3", "--json"];
    let mut command = on_small_disk(&home, r#""$@"; code=$?; ls out/w | sed 's/^/left: /'; exit $code"#);
    command.arg(home.program().get_program()).args(args).arg("--out=out");
    let ended = Process::start(command)
        .wait()
        .expect_error(1, &["cannot write out/w/", "No space left"]);
    let versions: Vec<_> = ended.events().iter().map(|event| event["version"].clone()).collect();
    assert_eq!(versions, [1, 2]);
    let epoch = server.topic("w")["epoch"].as_str().unwrap();
    let left = [1, 2]
        .map(|version| format!("left: {version:020}-{epoch}.safetensors\n"))
        .concat();
    assert!(ended.out.ends_with(&format!("{left}left: latest.safetensors\n")), "{ended:?}");
    let mut again = home.start(&[&args[..], &["--out=roomy"]].concat());
    assert!(
        again.wait_for_stdout("version").contains(r#""version":3"#),
        "it continues with the version that did not fit"
    );
    again.signal_and_wait(Signal::TERM).expect_code(143);
}

/// Goal: a folder that lacks a part of its model is refused at the start, with the file and the reason; a link that
/// leads nowhere and is no part of the model is named. Method: dangling links, placeholders of Git LFS, an empty index.
#[test]
fn incomplete_folders_are_refused() {
    const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n";
    let home = Home::new();
    let index = "model.safetensors.index.json";
    let link = |name: &str, file: &str| {
        let _ = fs::remove_file(home.path(name).join(file));
        std::os::unix::fs::symlink("../blobs/0123abcd", home.path(name).join(file)).unwrap();
    };
    let write = |name: &str, file: &str, text: &str| fs::write(home.path(name).join(file), text).unwrap();
    for name in ["shard", "extra", "index", "lfs-shard", "lfs-index", "lfs-tokenizer", "empty", "side"] {
        files::write_sharded(&home.path(name), 1);
    }
    let shard = files::SHARDED_FILES.iter().find(|file| file.ends_with(".safetensors")).unwrap();
    link("shard", shard);
    fs::remove_file(home.path("extra").join(index)).unwrap();
    link("extra", "model-00009-of-00009.safetensors");
    link("index", index);
    write("lfs-shard", shard, POINTER);
    write("lfs-index", index, POINTER);
    write("lfs-tokenizer", "tokenizer.json", POINTER);
    write("empty", index, r#"{"weight_map": {}}"#);
    for (name, file, reason) in [
        ("shard", *shard, "leads nowhere, so the model is incomplete"),
        ("extra", "model-00009-of-00009.safetensors", "leads nowhere, so the model is incomplete"),
        ("index", index, "leads nowhere, so the model is incomplete"),
        ("lfs-shard", shard, "is a Git LFS pointer"),
        ("lfs-index", index, "is a Git LFS pointer"),
        ("lfs-tokenizer", "tokenizer.json", "is a Git LFS pointer"),
        ("empty", index, "its weight_map is empty"),
    ] {
        let topic = format!("--topic=m={name}");
        home.run(&["serve", ANY_PORT, ON_HOST, &topic]).expect_error(1, &[file, reason]);
    }
    link("side", "special_tokens_map.json");
    let mut server = home.serve(&["--topic=m=side"]);
    server
        .process
        .wait_for_stderr("special_tokens_map.json (a link that leads nowhere)");
}

/// Goal: topics whose paths meet in one folder do not damage each other. Method: a folder `m` and a file `m/x`; with
/// --keep, `m` and `m/latest`, where the mirror has a link of that name.
#[test]
fn topics_whose_paths_meet_are_kept_apart() {
    let home = Home::new();
    files::write_sharded(&home.path("model"), 1);
    files::write_noise(&home.path("w"), 1000, 1);
    let server = home.serve(&["--topic=m=model", "--topic=m/x=w", "--topic=m/latest=w"]);
    receive(&home, &server, "m", "out");
    let refused = home.run(&["subscribe", server.ticket("m/x"), "--once", "--out=out"]);
    refused.expect_error(1, &["out/m was not written by tensor-relay for this topic"]);
    receive(&home, &server, "m", "out");
    let keep = |topic| home.run(&["subscribe", server.ticket(topic), "--once", "--out=kept", "--keep=2"]);
    keep("m").expect_code(0);
    let before = home.files_in("kept");
    keep("m/latest").expect_error(1, &["kept/m/latest was not written by tensor-relay for this topic"]);
    assert_eq!(home.files_in("kept"), before);
    keep("m/x").expect_code(0);
}

/// Goal: a topic that becomes a folder leaves no file with old content under its name, and the reverse. Method: a
/// server that follows a link to a file, then to a folder, and back.
#[test]
fn a_topic_of_another_kind_replaces_its_files() {
    let home = Home::new();
    files::write_sharded(&home.path("folder"), 1);
    files::write_noise(&home.path("file.safetensors"), 1000, 1);
    let point_to = |target: &str| {
        let (link, aside) = (home.path("source"), home.path("aside"));
        std::os::unix::fs::symlink(target, &aside).unwrap();
        fs::rename(aside, link).unwrap();
    };
    point_to("file.safetensors");
    let server = home.serve(&["--topic=m=source", "--watch", "--watch-interval=0.05"]);
    let mut follower = home.start(&["subscribe", server.ticket("m"), "--out=out"]);
    let mut kept = home.start(&["subscribe", server.ticket("m"), "--out=kept", "--keep=3"]);
    for (version, target) in [(1, "file.safetensors"), (2, "folder"), (3, "file.safetensors")] {
        point_to(target);
        for subscriber in [&mut follower, &mut kept] {
            subscriber.wait_for_stdout(&format!("m version {version}:"));
        }
        let is_folder = target == "folder";
        assert_eq!(
            (home.path("out/m").exists(), home.path("out/m.safetensors").exists()),
            (is_folder, !is_folder)
        );
        let latest = |name: &str| home.path(&format!("kept/m/{name}")).exists();
        assert_eq!((latest("latest"), latest("latest.safetensors")), (is_folder, !is_folder));
    }
}
