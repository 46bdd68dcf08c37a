//! Options from the environment and the configuration file, and the commands that show options, keys and completions.

use crate::files;
use serde_json::{Value, json};
use std::{fs, os::unix::fs::PermissionsExt};
use tensor_relay_tests::processes::{ANY_PORT, Ended, Home, Process, Signal};

/// Runs the program with `args` and additional environment variables.
fn run_with(home: &Home, variables: &[(&str, &str)], args: &[&str]) -> Ended {
    let mut command = home.program();
    command.args(args).envs(variables.iter().copied());
    Process::start(command).wait()
}

/// Writes the default configuration file.
fn configure(home: &Home, text: &str) {
    fs::create_dir_all(home.path(".config/tensor-relay")).unwrap();
    fs::write(home.path(".config/tensor-relay/config.toml"), text).unwrap();
}

/// The value of an option and its source, as `config --json` reports them.
fn value_and_source(config: &Value, command: &str, option: &str) -> (String, String) {
    let options = config["commands"][command].as_array().unwrap();
    let option = options.iter().find(|entry| entry["option"] == option).unwrap();
    let values: Vec<_> = option["values"]
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_str().unwrap())
        .collect();
    (values.join(" "), option["source"].as_str().unwrap().into())
}

/// Goal: a configuration file alone configures a server and a subscriber, as in a container. Method: one file for both,
/// without flags; then a variable and a flag that override it.
#[test]
fn a_configuration_file_suffices_for_both_ends() {
    let home = Home::new();
    files::write_noise(&home.path("a"), 1000, 1);
    files::write_noise(&home.path("b"), 1000, 2);
    configure(
        &home,
        "[default]\njson = true\nticket = 'tickets'\n[serve]\nlisten = '127.0.0.1:0'\nticket_file = 'tickets'\n\
         [serve.topics]\na = 'a'\n'deep/b' = 'b'\n[subscribe]\ntopic = 'a'\nout = 'out'\nonce = true\n",
    );
    let mut server = home.start(&["serve"]);
    let line = server.wait_for_stdout("serving");
    assert!(line.contains(r#""topic":"a""#) && line.contains(r#""topic":"deep/b""#), "{line}");
    assert_eq!(home.run(&["subscribe"]).expect_code(0).json()["topic"], "a");
    let by_variable = run_with(&home, &[("TENSOR_RELAY_TOPIC", "deep/b")], &["subscribe"]).expect_code(0);
    assert_eq!(by_variable.json()["topic"], "deep/b");
    let by_flag =
        run_with(&home, &[("TENSOR_RELAY_TOPIC", "deep/b")], &["subscribe", "--topic=a", "--no-json"])
            .expect_code(0);
    assert!(by_flag.out.starts_with("a version 1: "), "{by_flag:?}");
    assert_eq!(home.files_in("out"), ["a.safetensors", "deep/b.safetensors"]);
    server.signal_and_wait(Signal::TERM).expect_code(0);
}

/// Goal: environment variables alone configure a server, including its topics and switches. Method: `serve` without
/// options.
#[test]
fn environment_variables_suffice_for_a_server() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let mut command = home.program();
    command.arg("serve").envs([
        ("TENSOR_RELAY_TOPICS", "a=w;b=w"),
        ("TENSOR_RELAY_LISTEN", "127.0.0.1:0"),
        ("TENSOR_RELAY_JSON", "1"),
        ("TENSOR_RELAY_STATE_DIR", ""),
        ("TENSOR_RELAY_CONFIG", ""),
    ]);
    let mut server = Process::start(command);
    let line = server.wait_for_stdout("serving");
    assert!(line.contains(r#""topic":"a""#) && line.contains(r#""topic":"b""#), "{line}");
    assert_eq!(
        home.files_in("state"),
        ["tensor-relay/access/secrets", "tensor-relay/identity.key", "tensor-relay/tickets"],
        "an empty variable is ignored"
    );
    server.signal_and_wait(Signal::TERM).expect_code(0);
}

/// Goal: `config` shows the effective value of an option and its source. Method: an option from each layer, as text and
/// as JSON, with a secret among them.
#[test]
fn config_shows_the_source_of_an_option() {
    let home = Home::new();
    configure(
        &home,
        "[default]\nticket = 'relay://secret'\n\n[serve]\ngrace = 2.5\nlisten = '127.0.0.1:1'\n",
    );
    let variables = [("TENSOR_RELAY_LISTEN", "127.0.0.1:2"), ("TENSOR_RELAY_QUIET", "yes")];
    let output = run_with(&home, &variables, &["config", "--json"]).expect_code(0);
    let config = output.json();
    assert_eq!(config["file"], home.argument(".config/tensor-relay/config.toml"));
    assert_eq!(value_and_source(&config, "serve", "listen"), ("127.0.0.1:2".into(), "environment".into()));
    assert_eq!(value_and_source(&config, "serve", "grace"), ("2.5".into(), "file".into()));
    assert_eq!(value_and_source(&config, "serve", "chunk-size"), ("4MiB".into(), "default".into()));
    assert_eq!(value_and_source(&config, "subscribe", "quiet"), ("true".into(), "environment".into()));
    assert_eq!(value_and_source(&config, "list", "ticket"), ("(hidden)".into(), "file".into()));
    let plain = run_with(&home, &variables, &["config", "serve"]).expect_code(0);
    let line = |option: &str| {
        let line = plain.out.lines().find(|line| line.split_whitespace().nth(1) == Some(option));
        line.unwrap().split_whitespace().skip(2).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("--listen"), "127.0.0.1:2 TENSOR_RELAY_LISTEN");
    assert_eq!(line("--grace"), format!("2.5 {}:5", home.argument(".config/tensor-relay/config.toml")));
    assert!(!format!("{output:?}{plain:?}").contains("relay://"), "a secret was printed");
    assert!(!plain.out.lines().any(|line| line.starts_with("subscribe")), "{plain:?}");
    home.run(&["config", "bogus"])
        .expect_error(2, &["bogus", "serve, publish, relay, subscribe"]);
}

/// Goal: each bound on clients is shown with its reason, and the sum of their memory is the maximum that `serve`
/// reports.
#[test]
fn config_shows_every_bound() {
    let home = Home::new();
    files::write_zeros(&home.path("w"), 1 << 10);
    let report = home.run(&["config", "serve", "--json"]).expect_code(0).json();
    let bounds = report["serve"]["bounds"].as_array().unwrap();
    let sessions = bounds.iter().find(|bound| bound["bound"] == "sessions").unwrap();
    assert_eq!((&sessions["most"], &sessions["unit"]), (&json!(1_024), &json!("count")));
    assert!(
        bounds
            .iter()
            .all(|bound| bound["reason"].as_str().is_some_and(|reason| !reason.is_empty()))
    );
    let sum: u64 = bounds.iter().filter_map(|bound| bound["memory_bytes"].as_u64()).sum();
    assert_eq!(report["serve"]["memory_bytes_max"], sum);
    assert_eq!(home.serve(&["--topic=w=w"]).report["memory_bytes_max"], sum);
    let plain = home.run(&["config", "serve"]).expect_code(0).out;
    assert!(
        plain.contains("BOUND OF SERVE") && plain.contains("memory in addition to versions: at most"),
        "{plain}"
    );
    assert!(!home.run(&["config", "subscribe"]).expect_code(0).out.contains("BOUND"));
}

/// Goal: a mistake in the file or in a variable is reported with its location, and the command does not run. Method:
/// mistakes in the options of the command that runs and of others.
#[test]
fn mistakes_are_reported_with_their_location() {
    let home = Home::new();
    let file = home.argument("c.toml");
    for (text, causes) in [
        ("[serve]\n\nlistne = 1\n", ["c.toml:3: ", "listne", "do you mean listen?"]),
        ("[serve]\nlisten = 'nowhere'\n", ["c.toml:2: ", "listen cannot be \"nowhere\"", "socket address"]),
        ("[sevre]\n", ["c.toml:1: ", "[sevre]", "do you mean serve?"]),
        ("[serve]\nlisten\n", ["c.toml:2: ", "", ""]),
    ] {
        fs::write(&file, text).unwrap();
        home.run(&["serve", ANY_PORT, "--topic=w=w", "--config", &file])
            .expect_error(2, &causes);
        run_with(&home, &[("TENSOR_RELAY_CONFIG", &file)], &["list", "relay://x"]).expect_error(2, &causes);
        home.run(&["--config", &file, "config"]).expect_error(2, &causes);
        home.run(&["--config", &file, "serve", "--help"]).expect_code(0);
    }
    home.run(&["list", "x", "--config=/no/file"])
        .expect_error(2, &["/no/file", "--config"]);
    let wrong = [("TENSOR_RELAY_GRACE", "soon")];
    let causes = ["TENSOR_RELAY_GRACE", "\"soon\"", "not a number of seconds"];
    run_with(&home, &wrong, &["serve", "--topic=w=w"]).expect_error(2, &causes);
    run_with(&home, &wrong, &["config"]).expect_error(2, &causes);
    run_with(&home, &wrong, &["serve", "--topic=w=w", "--grace=late"])
        .expect_error(2, &["--grace", "'late'"]);
    assert!(home.files_in("state").is_empty());
}

/// Goal: a server key is created once, shown afterwards, and used in tickets. Method: show it, create it twice, serve
/// with it.
#[test]
fn a_key_is_created_once_and_shown() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let missing = home.run(&["keys", "show", "--json"]);
    missing.expect_error(1, &["no server key", "tensor-relay serve", "keys create", "--state-dir"]);
    assert!(home.files_in("state").is_empty(), "`keys show` creates no key");
    let created = home.run(&["keys", "create", "--json"]).expect_code(0).json();
    let path = home.path("state/tensor-relay/identity.key");
    assert_eq!(created["path"], path.to_str().unwrap());
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let key = created["key"].as_str().unwrap();
    home.run(&["keys", "create"])
        .expect_error(1, &["already holds a key", key, "nothing was changed"]);
    let shown = home.run(&["keys", "show"]).expect_code(0);
    assert_eq!(shown.out, format!("{key}  {}\n", path.display()));
    let server = home.serve(&["--topic=w=w"]);
    assert!(server.ticket("w").contains(key));
    let other = home.run(&["keys", "create", "--state-dir=other"]).expect_code(0);
    assert!(other.out.ends_with("other/identity.key\n") && !other.out.contains(key), "{other:?}");
}

/// Goal: completions cover all commands. Method: every shell.
#[test]
fn completions_cover_all_commands() {
    let home = Home::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = home.run(&["completions", shell]).expect_code(0).out;
        assert!(script.contains("subscribe") && script.contains("state-dir"), "{shell}");
    }
    home.run(&["completions", "dos"]).expect_error(2, &["dos"]);
}
