//! Caches of inference engines that are sent with a model, and unpacked where they fit.

use super::files;
use serde_json::{Value, json};
use std::{fs, os::unix::fs::PermissionsExt};
use tensor_relay_tests::processes::{ANY_PORT, Home, Serving, Signal, wait_until};

/// The folder of the engine, at both ends.
const ENGINE: &str = "engine/cache";

/// A model, and an engine's cache with `files` files in two entries, one of which may be executed.
fn home_with_cache(files: usize) -> Home {
    let home = Home::new();
    files::write_sharded(&home.path("model"), 1);
    for number in 0..files {
        let path = home.path(&format!("{ENGINE}/k{}/f{number}.so", number % 2));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("code {number}").repeat(1000)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(if number == 0 { 0o755 } else { 0o644 }))
            .unwrap();
    }
    home
}

fn cache_option(home: &Home) -> String {
    format!("--engine-cache=jit={}", home.argument(ENGINE))
}

/// Serves the model with the cache, whose folder then disappears, as on another host.
fn serve(home: &Home, args: &[&str]) -> Serving {
    let cache = cache_option(home);
    let mut server = home.serve(&[&["--topic=m=model", &*cache], args].concat());
    server.process.wait_for_stderr("sends the cache jit of");
    fs::rename(home.path("engine"), home.path("filled")).unwrap();
    server
}

fn receive(home: &Home, server: &Serving, args: &[&str]) -> (Value, String) {
    let all = [&["subscribe", server.ticket("m"), "--once", "--json", "--out=out"], args].concat();
    let ended = home.run(&all).expect_code(0);
    (ended.json(), ended.err)
}

/// Goal: an engine of another host finds the cache as it was, beside what it has; it is unpacked only on request; and
/// a folder that was received carries the cache on. Method: as told; then the received folder is served.
#[test]
fn a_cache_is_unpacked_where_its_engine_looks() {
    let home = home_with_cache(20);
    let server = serve(&home, &[]);
    let names: Vec<&str> = server.topic("m")["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|n| n.as_str().unwrap())
        .collect();
    assert!(names.contains(&"jit.engine-cache.tar"), "{names:?}");
    let (event, _) = receive(&home, &server, &[]);
    assert_eq!(event["engine_caches"], json!({}));
    assert!(home.path("out/m/jit.engine-cache.tar").is_file() && !home.path(ENGINE).exists());
    files::assert_same_model(&home.path("model"), &home.path("out/m"));

    fs::create_dir_all(home.path(ENGINE).join("k1")).unwrap();
    fs::write(home.path(ENGINE).join("k1/f3.so"), "its own").unwrap();
    let (event, told) = receive(&home, &server, &[&cache_option(&home)]);
    let expected =
        json!({ "jit": { "folder": home.argument(ENGINE), "new": 19, "kept": 1, "reason": null } });
    assert_eq!(event["engine_caches"], expected);
    assert!(
        told.contains("the engine cache jit is in") && told.contains("19 files new, 1 were there"),
        "{told}"
    );
    for name in home.files_in("filled/cache") {
        let (sent, found) = (home.path("filled/cache").join(&name), home.path(ENGINE).join(&name));
        let content = fs::read_to_string(&found).unwrap();
        match &*name {
            "k1/f3.so" => assert_eq!(content, "its own"),
            _ => assert!(content == fs::read_to_string(&sent).unwrap(), "{name}"),
        }
        let is_executable = fs::metadata(&found).unwrap().permissions().mode() & 0o111 != 0;
        assert_eq!(is_executable, name == "k0/f0.so", "{name}");
    }

    fs::remove_dir_all(home.path("engine")).unwrap();
    fs::rename(home.path("out/m"), home.path("received")).unwrap();
    let second = home.serve(&["--topic=m=received"]);
    let (event, _) = receive(&home, &second, &[&cache_option(&home)]);
    assert_eq!(event["engine_caches"]["jit"]["new"], 20);
}

/// Goal: a machine that differs, another folder and a version without the cache get no file, and are told why; the
/// model arrives all the same.
#[test]
fn a_cache_that_does_not_fit_is_told_with_the_fact() {
    let home = home_with_cache(2);
    let server = serve(&home, &["--engine-fact=gpu=NVIDIA H200,torch=2.9.0"]);
    let other = format!("--engine-cache=jit={}", home.argument("other"));
    let cache = cache_option(&home);
    for (args, reasons) in [
        (
            &[&*cache, "--engine-fact=gpu=NVIDIA H100,torch=2.9.0"][..],
            &["gpu: NVIDIA H200 there, NVIDIA H100 here"][..],
        ),
        (&[&*other, "--engine-fact=gpu=*,torch=*"], &["folder: ", "engine/cache there", "other here"]),
        (&["--engine-cache=none=/tmp/none"], &["the version has none of this name"]),
    ] {
        let (event, told) = receive(&home, &server, args);
        let found = event["engine_caches"].as_object().unwrap().values().next().unwrap();
        let reason = found["reason"].as_str().unwrap();
        for part in reasons {
            assert!(reason.contains(part) && told.contains(part), "{reason}; {told}");
        }
        files::assert_same_model(&home.path("model"), &home.path("out/m"));
    }
    assert!(!home.path("engine").exists() && !home.path("other").exists());
    let (event, _) = receive(&home, &server, &[&cache, "--engine-fact=gpu=*,torch=2.9.0"]);
    assert_eq!(event["engine_caches"]["jit"]["reason"], Value::Null);
}

#[test]
fn a_cache_that_cannot_be_sent_ends_the_server() {
    let home = home_with_cache(1);
    files::write_noise(&home.path("w"), 1000, 1);
    fs::create_dir(home.path("empty")).unwrap();
    let cache = cache_option(&home);
    let empty = format!("--engine-cache=jit={}", home.argument("empty"));
    for (args, parts) in [
        (["--topic=m=w", &*cache], &["w is a single file", "the folder of a model"][..]),
        (["--topic=m=model", &*empty], &["empty, the cache jit, is missing or has no file"]),
    ] {
        home.run(&[&["serve", ANY_PORT], &args[..]].concat()).expect_error(1, parts);
    }
    home.run(&["serve", ANY_PORT, "--topic=m=model", "--engine-cache=jit"])
        .expect_error(2, &["where the cache jit lies is not known"]);
    let refused = home.run(&["subscribe", "relay://x", &cache]).expect_code(2);
    assert!(refused.err.contains("--out"), "{refused:?}");
}

/// Goal: a process that is killed while it unpacks leaves nothing that an engine takes for an entry, and the next one
/// completes. Method: kill -9 as soon as there are unpacked files, until a call was killed before it showed them.
#[test]
fn a_killed_process_leaves_no_part_of_a_cache() {
    let home = home_with_cache(3_000);
    let server = serve(&home, &[]);
    let cache = cache_option(&home);
    let args = ["subscribe", server.ticket("m"), "--once", "--json", "--out=out", &cache];
    let visible = || {
        let mut names = home.files_in(ENGINE);
        names.retain(|name| !name.starts_with(".tensor-relay"));
        names
    };
    let mut was_killed_in_time = false;
    for _ in 0..20 {
        let process = home.start(&args);
        let staging = home.path(ENGINE).join(".tensor-relay.unpacking/k1");
        wait_until("something is unpacked", || staging.exists() || !visible().is_empty());
        process.signal_and_wait(Signal::KILL);
        was_killed_in_time = visible().is_empty();
        if was_killed_in_time {
            break;
        }
        fs::remove_dir_all(home.path("engine")).unwrap();
    }
    assert!(was_killed_in_time);
    let (event, _) = receive(&home, &server, &[&cache]);
    assert_eq!(event["engine_caches"]["jit"]["new"], 3_000);
    assert_eq!(visible(), home.files_in("filled/cache"));
    assert_eq!(home.files_in(ENGINE).len(), 3_001, "nothing but the lock is left");
}
