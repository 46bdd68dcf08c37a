//! Failures, most of them before a transfer: the exit code and the message of each.

use crate::files;
use std::{
    fs,
    io::{Read, Write},
    net::{Shutdown, TcpStream, UdpSocket},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Command,
    time::Duration,
};
use tensor_relay_tests::{
    processes::{ANY_PORT, Home, Process, Signal},
    skip,
};

/// A ticket for a key that no server has.
pub(crate) fn unknown_ticket(address: &str) -> String {
    format!("relay://{address}/w?key=sha256:{}", "ab".repeat(32))
}

/// Goal: a server with another key than the ticket's is not trusted, and the error shows both keys. Method: the ticket
/// of a running server, with another key in it.
#[test]
fn another_key_is_refused() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w"]);
    let ticket = unknown_ticket(server.listen());
    let causes = ["has key sha256:", "the ticket expects sha256:abab"];
    home.run(&["subscribe", &ticket, "--out=out"]).expect_error(4, &causes);
    home.run(&["list", &ticket]).expect_error(4, &causes);
    assert!(home.files_in("out").is_empty());
}

/// Goal: no first message of a stranger makes the server panic, and it continues to serve. Method: a ClientHello whose
/// length is wrong, one of TLS 1.2, an alert, a fatal one, a record that is too long, and a request of HTTP.
#[test]
fn strange_first_messages_are_refused() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w"]);
    let messages: [&[u8]; 6] = [
        b"\x16\x03\x01\x00\x08\x01\x00\x00\x02\x03\x03\x02\x00",
        b"\x16\x03\x01\x00\x2d\x01\x00\x00\x29\x03\x030123456789abcdef0123456789abcdef\x00\x00\x02\xc0\x2f\x01\x00",
        b"\x15\x03\x03\x00\x02\x01\x00",
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\x16\x03\x01\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
    ];
    for message in messages {
        let mut stream = TcpStream::connect(server.listen()).unwrap();
        stream.write_all(message).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let _ = stream.read_to_end(&mut vec![]); // An alert, or a reset.
    }
    home.run(&["subscribe", &home.create_ticket_for_all(&server), "--topic=w", "--once"])
        .expect_code(0);
    let ended = server.process.signal_and_wait(Signal::TERM);
    assert!(!ended.err.contains("panicked"), "{ended:?}");
    ended.expect_code(0);
}

/// Goal: a server that does not answer is an error within the user's timeout, with advice. Method: an open port that
/// never answers, a closed port, and a name that does not resolve.
#[test]
fn an_unreachable_server_is_an_error_within_the_timeout() {
    let home = Home::new();
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for address in [silent.local_addr().unwrap(), closed] {
        let ticket = unknown_ticket(&address.to_string());
        for command in ["subscribe", "list"] {
            let ended = home.run(&[command, &ticket, "--connect-timeout=1", "--transport=auto"]);
            assert!(ended.run_time < Duration::from_secs(8), "{ended:?}");
            ended.expect_error(3, &["no answer from", &address.to_string(), "within 1000 ms", "firewall"]);
        }
    }
    let ticket = unknown_ticket("no-such-host.invalid:4747");
    home.run(&["subscribe", &ticket, "--connect-timeout=5"])
        .expect_error(3, &["no-such-host.invalid"]);
}

/// Goal: a topic that does not appear within `--wait` is an error with advice. Method: subscribe to a topic that the
/// server does not have.
#[test]
fn a_missing_topic_is_an_error_after_the_wait() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w"]);
    let ticket = home.create_ticket_for_all(&server);
    let args = ["subscribe", &ticket, "--topic=other", "--wait=1", "--out=out"];
    let ended = home.run(&args);
    assert!(ended.run_time >= Duration::from_secs(1), "{ended:?}");
    ended.expect_error(5, &["no topic other appeared within 1000 ms", "tensor-relay list"]);
    assert!(home.files_in("out").is_empty());
}

/// Goal: the error for a port in use names the port and the option that selects another. Method: two servers, one port.
#[test]
fn the_error_names_a_port_in_use() {
    let home = files::home_with_model();
    let first = home.serve(&["--topic=w=w"]);
    let listen = format!("--listen={}", first.listen());
    let port = first.listen().rsplit(':').next().unwrap();
    home.run(&["serve", "--topic=w=w", &listen])
        .expect_error(1, &["UDP port", port, "in use by another process", "--listen"]);
    home.run(&["list", first.ticket("w")]).expect_code(0);
}

/// Goal: usage errors have exit code 2, and name the mistake. Method: tickets, topics, options and metadata with
/// mistakes.
#[test]
fn invalid_arguments_are_usage_errors() {
    let home = files::home_with_model();
    fs::write(home.path("nonsense"), "nonsense\n").unwrap();
    fs::write(home.path("empty"), "\n").unwrap();
    let ticket = unknown_ticket("127.0.0.1:4747");
    let truncated = &ticket[..ticket.len() - 10];
    let mistakes: [(&[&str], &[&str]); 17] = [
        (&["subscribe", "nonsense"], &["nonsense holds no ticket", "relay://"]),
        (&["subscribe", "empty"], &["empty"]),
        (&["subscribe", truncated], &["was the ticket cut off?"]),
        (&["list", truncated], &["was the ticket cut off?"]),
        (&["subscribe", "relay://"], &["ticket"]),
        (&["subscribe", &ticket, "--topic=../up"], &["--topic", ".."]),
        (&["serve", ANY_PORT], &["nothing to serve", "--topic", "--publish-socket"]),
        (&["serve", ANY_PORT, "--topic=w=w", "--publish-uid=7"], &["--publish-socket"]),
        (&["publish", "s", "../t", "w"], &["TOPIC", ".."]),
        (&["publish", "s", "t", "w", "--metadata=x"], &["KEY=VALUE"]),
        (&["serve", ANY_PORT, "--topic=w"], &["--topic", "write NAME=FILE"]),
        (&["serve", ANY_PORT, "--topic=../w=w"], &["--topic", ".."]),
        (&["serve", ANY_PORT, "--topic=w=w", "--topic=w=other"], &["--topic w=…", "twice"]),
        (&["serve", "--listen=nowhere", "--topic=w=w"], &["--listen"]),
        (&["serve", ANY_PORT, "--topic=w=w", "--stall-timeout=0"], &["--stall-timeout", "more than 0"]),
        (&["serve", ANY_PORT, "--topic=w=w", "--watch-interval=0"], &["--watch-interval", "more than 0"]),
        (
            &["publish", "s", "t", "w", "--metadata=tensor-relay.x=1"],
            &["--metadata", "reserved for tensor-relay"],
        ),
    ];
    for (args, causes) in mistakes {
        home.run(args).expect_error(2, causes);
    }
}

/// Goal: the error for a ticket without a topic says how to name one.
#[test]
fn a_ticket_without_a_topic_needs_the_option() {
    let ticket = unknown_ticket("127.0.0.1:4747").replace("/w?", "?");
    Home::new()
        .run(&["subscribe", &ticket])
        .expect_error(2, &["the ticket names no topic", "--topic NAME"]);
}

/// Goal: an argument that is neither a ticket nor a file is a usage error, like every invalid ticket.
#[test]
fn an_invalid_ticket_is_a_usage_error() {
    for arg in ["hello", "relay:/127.0.0.1:1/w"] {
        Home::new().run(&["subscribe", arg]).expect_error(2, &[arg, "neither a ticket"]);
    }
}

/// Goal: bytes that are not text are not a ticket, wherever they come from. Method: bytes that are not UTF-8, on stdin
/// and in a file.
#[test]
fn a_ticket_that_is_not_text_is_a_usage_error() {
    let home = Home::new();
    fs::write(home.path("bytes"), [0xff, 0xfe, b'\n']).unwrap();
    let mut command = home.program();
    command.args(["subscribe", "-"]);
    let stdin = fs::File::open(home.path("bytes")).unwrap();
    Process::start_with(command, stdin)
        .wait()
        .expect_error(2, &["stdin holds no ticket", "UTF-8"]);
    home.run(&["subscribe", "bytes"]).expect_error(2, &["UTF-8"]);
}

/// Goal: an invalid log filter is an error; an empty filter is ignored. Method: a filter with an unknown level, and an
/// empty one.
#[test]
fn an_invalid_log_filter_is_a_usage_error() {
    let home = files::home_with_model();
    let with_filter = |filter| {
        let mut command = home.program();
        command.args(["keys", "create"]).env("TENSOR_RELAY_LOG", filter);
        Process::start(command).wait()
    };
    with_filter("info,quinn=loud").expect_error(2, &["TENSOR_RELAY_LOG", "info,quinn=loud", "debug"]);
    with_filter("").expect_code(0);
}

/// Goal: an invalid chunk size is a usage error that names the option. Method: chunks of seven bytes.
#[test]
fn an_invalid_chunk_size_is_a_usage_error() {
    files::home_with_model()
        .run(&["serve", ANY_PORT, "--topic=w=w", "--chunk-size=7"])
        .expect_error(2, &["--chunk-size"]);
}

/// Whether an error line repeats a cause.
fn repeats_a_cause(line: &str) -> bool {
    let causes: Vec<&str> = line.trim_end().split(": ").collect();
    (1..causes.len()).any(|index| causes[..index].contains(&causes[index]))
}

/// Goal: an error message has each cause once. Method: errors whose message contains that of their source, at startup
/// and from the file watcher.
#[test]
fn an_error_repeats_no_cause() {
    let home = files::home_with_model();
    fs::write(home.path("short"), "1").unwrap();
    for args in [&["serve", ANY_PORT, "--topic=w=none"], &["serve", ANY_PORT, "--topic=w=short"]] {
        let ended = home.run(args).expect_code(1);
        assert!(!repeats_a_cause(&ended.err), "{}", ended.err);
    }
    let mut server = home.serve(&["--topic=w=w", "--watch", "--watch-interval=0.05"]);
    files::replace(&home.path("w"), |path| fs::copy(home.path("short"), path).map(drop).unwrap());
    let warned = server.process.wait_for_stderr("cannot be published");
    assert!(!repeats_a_cause(&warned), "{warned}");
}

/// Goal: the error for an invalid file names the file and the reason, whatever its bytes. Method: files that are
/// missing, not regular, truncated, corrupt, or made to break a parser.
#[test]
fn invalid_files_are_refused() {
    let home = files::home_with_model();
    let valid = fs::read(home.path("w")).unwrap();
    let tensor = |json: &str| files::with_header(&format!(r#"{{"a":{json}}}"#), &[0; 8]);
    // Tensors are counted before they are parsed.
    let many: Vec<String> = (0..1_100_000).map(|number| format!(r#""{number}":0"#)).collect();
    let overlapping = r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},
                          "b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
    let hostile: [(Vec<u8>, &str); 18] = [
        (vec![], "header"),
        (vec![1; 7], "header"),
        (vec![0xff; 64], "header of 18446744073709551615 bytes"),
        ((1u64 << 40).to_le_bytes().to_vec(), "header of 1099511627776 bytes"),
        (valid[..valid.len() / 2].to_vec(), "was the file cut off?"),
        (valid[..20].to_vec(), "header"),
        ([&valid[..], b"more"].concat(), "header describes 1000 bytes of tensors, but 1004 follow"),
        (files::with_header("not json", &[]), "header is not valid"),
        (files::with_header(&"[".repeat(1 << 20), &[]), "header is not valid"),
        (files::with_header(&r#"{"a":"#.repeat(1 << 18), &[]), "header is not valid"),
        (tensor(r#"{"dtype":"F33","shape":[2],"data_offsets":[0,8]}"#), "F33"),
        (tensor(r#"{"dtype":"F32","shape":[3],"data_offsets":[0,8]}"#), "header is not valid"),
        (tensor(r#"{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}"#), "header is not valid"),
        (
            tensor(r#"{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}"#),
            "header is not valid",
        ),
        (tensor(r#"{"dtype":"F32","shape":[2],"data_offsets":[8,0]}"#), "header is not valid"),
        (tensor(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#), "header is not valid"),
        (files::with_header(overlapping, &[0; 8]), "header is not valid"),
        (files::with_header(&format!("{{{}}}", many.join(",")), &[]), "1100000 tensors"),
    ];
    for (bytes, cause) in hostile {
        fs::write(home.path("hostile"), bytes).unwrap();
        assert_refused(&home, "hostile", cause);
    }
    fs::create_dir(home.path("folder")).unwrap();
    for (name, cause) in
        [("missing", "No such file"), ("folder", "no .safetensors file"), ("/dev/zero", "regular file")]
    {
        assert_refused(&home, name, cause);
    }
}

/// Goal: tensor names that a receiver could misinterpret are refused by the server. Method: a tensor under the name of
/// the metadata, names with control characters, an empty name, and one that is too long.
#[test]
fn invalid_tensor_names_are_refused() {
    let home = Home::new();
    for (name, cause) in [
        ("__metadata__", "header is not valid"),
        (r"a\nb", r#""a\nb" contains '\n'"#),
        (r"\u001b[31m", r"contains '\u{1b}'"),
        (r"a\u0000", r"contains '\0'"),
        ("", "empty"),
        (&"n".repeat(5000), "5000"),
    ] {
        let json = format!(r#"{{"{name}":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}"#);
        fs::write(home.path("named"), files::with_header(&json, &[0; 8])).unwrap();
        assert_refused(&home, "named", cause);
    }
}

/// Checks that `serve` fails because of `file` and prints no ticket.
fn assert_refused(home: &Home, file: &str, cause: &str) {
    let ended = home
        .run(&["serve", ANY_PORT, &format!("--topic=w={file}")])
        .expect_error(1, &[file, cause]);
    assert!(ended.out.is_empty(), "{ended:?}");
    assert!(!ended.err.contains("panicked"), "{ended:?}");
}

/// Goal: a named pipe is refused; the server does not wait for a writer. Method: a pipe without a writer.
#[test]
fn a_pipe_is_refused() {
    let home = Home::new();
    assert!(Command::new("mkfifo").arg(home.path("pipe")).status().unwrap().success());
    home.run(&["serve", ANY_PORT, "--topic=w=pipe"]).expect_error(1, &["pipe"]);
}

/// Goal: an unusable output folder is an error before anything is received. Method: a file where the folder should be,
/// and a file where a topic's folder should be.
#[test]
fn an_unusable_output_folder_is_an_error() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w", "--topic=a/w=w"]);
    fs::write(home.path("file"), "mine").unwrap();
    home.run(&["subscribe", server.ticket("w"), "--out=file"])
        .expect_error(1, &["cannot use the output folder file"]);
    home.run(&["subscribe", server.ticket("w"), "--out=file/below"])
        .expect_error(1, &["file/below"]);
    fs::create_dir(home.path("out")).unwrap();
    fs::write(home.path("out/a"), "mine").unwrap();
    home.run(&["subscribe", server.ticket("a/w"), "--out=out"])
        .expect_error(1, &["cannot write out/a/w.safetensors"]);
    assert_eq!(fs::read(home.path("file")).unwrap(), b"mine");
    assert_eq!(
        (home.files_in("out"), fs::read(home.path("out/a")).unwrap()),
        (vec!["a".into()], b"mine".into())
    );
}

/// Goal: the error for a state directory or ticket file that cannot be written names it and the option that selects
/// another. Method: paths below a file; a key file that holds no key; and a folder without write permission.
#[test]
fn the_error_names_an_unwritable_path() {
    let home = files::home_with_model();
    fs::write(home.path("keys"), "nonsense").unwrap();
    let serve = ["serve", ANY_PORT, "--topic=w=w"];
    home.run(&[&serve[..], &["--state-dir=keys/below"]].concat())
        .expect_error(1, &["keys/below", "--state-dir"]);
    home.run(&[&serve[..], &["--ticket-file=keys/below"]].concat())
        .expect_error(1, &["cannot write the ticket file", "keys/below"]);
    fs::create_dir(home.path("broken")).unwrap();
    fs::write(home.path("broken/identity.key"), "nonsense").unwrap();
    home.run(&[&serve[..], &["--state-dir=broken"]].concat())
        .expect_error(1, &["broken/identity.key is not a private key"]);
    fs::create_dir(home.path("closed")).unwrap();
    fs::set_permissions(home.path("closed"), fs::Permissions::from_mode(0o500)).unwrap();
    for place in ["--state-dir=closed", "--state-dir=closed/below"] {
        let mut command = without_override(&home);
        command.args(serve).arg(place);
        Process::start(command)
            .wait()
            .expect_error(1, &["closed", "ermission denied", "--state-dir"]);
    }
}

/// The program, to which the modes of files apply even if it runs as root.
fn without_override(home: &Home) -> Command {
    if !rustix::process::geteuid().is_root() {
        return home.program();
    }
    let mut command = home.isolated(Command::new("setpriv"));
    command.arg("--bounding-set=-dac_override,-dac_read_search");
    command.arg(home.program().get_program());
    command
}

/// Goal: a full disk fails the subscriber, and leaves neither a partial nor a temporary file. Method: a file system of
/// 1 MiB as output folder, in a mount namespace of the subscriber, which lists it afterwards. Skipped if the system
/// allows no such namespace.
#[test]
fn a_full_disk_leaves_no_partial_file() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 4 << 20, 1);
    fs::create_dir(home.path("out")).unwrap();
    if let Err(reason) = try_small_disk(&home) {
        return skip(format_args!("the test cannot mount a small disk here: {reason}"));
    }
    let server = home.serve(&["--topic=w=w"]);
    let program = home.program().get_program().to_owned();
    let mut command =
        on_small_disk(&home, r#""$@"; code=$?; find out -type f -exec echo left: {} +; exit $code"#);
    command
        .arg(program)
        .args(["subscribe", server.ticket("w"), "--once", "--out=out"]);
    let ended = Process::start(command)
        .wait()
        .expect_error(1, &["cannot write out/w.safetensors", "No space left"]);
    assert_eq!(ended.out, "", "no file remains, and no version is reported");
}

/// Whether [`on_small_disk`] works on this system; the error says why not.
pub(crate) fn try_small_disk(home: &Home) -> Result<(), String> {
    let tried = on_small_disk(home, "true").output().map_err(|e| e.to_string())?;
    match tried.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&tried.stderr).trim().into()),
    }
}

/// A shell that runs `script` with a disk of 1 MiB at `out`. The disk disappears when the shell exits.
pub(crate) fn on_small_disk(home: &Home, script: &str) -> Command {
    let mut command = home.isolated(Command::new("unshare"));
    let mounted = format!("mount -t tmpfs -o size=1m none out && {{ {script}; }}");
    command.args(["--map-root-user", "--mount", "sh", "-c", &mounted, "sh"]);
    command
}

/// Goal: a subscriber needs only its ticket: no home and no state; it writes nothing. Method: receive without `--out`,
/// from an empty folder, without an environment.
#[test]
fn a_subscriber_needs_only_its_ticket() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w", "--state-dir=keys"]);
    let other = Home::new();
    let mut command = other.program();
    command.env_clear().args(["subscribe", server.ticket("w"), "--once"]);
    let received = Process::start(command).wait().expect_code(0);
    assert!(
        received.out.starts_with("w version 1: 1 tensor,") && !received.out.contains("saved"),
        "{received:?}"
    );
    assert!(other.files_in("").is_empty());
    assert!(!Path::new(&other.path("state")).exists());
}

/// Goal: writing a file atomically never replaces anything but a regular file; the error says what to do instead.
/// Method: tickets to a FIFO, a link into /proc, stdout and a device; a version onto a FIFO.
#[test]
fn only_regular_files_are_replaced() {
    let home = files::home_with_model();
    let fifo = |name: &str| {
        let (path, mode) = (home.path(name), rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR);
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    };
    fifo("fifo");
    std::os::unix::fs::symlink("/proc/self/fd/1", home.path("stdout")).unwrap();
    let mistakes = [
        ("fifo", "it is a FIFO, not a regular file"),
        ("stdout", "it is a link into /proc, not a regular file"),
        ("-", "the name of a file, not `-`"),
        ("/dev/null", "it is a device, not a regular file"),
    ];
    for (name, cause) in mistakes {
        let args = ["serve", ANY_PORT, "--topic=w=w", "--ticket-file", name];
        home.run(&args)
            .expect_error(2, &["--ticket-file", cause, "in the state directory"]);
    }
    let is_fifo = |name: &str| {
        let kind = fs::symlink_metadata(home.path(name)).unwrap().file_type();
        std::os::unix::fs::FileTypeExt::is_fifo(&kind)
    };
    assert!(is_fifo("fifo") && home.path("stdout").is_symlink());
    fs::create_dir(home.path("out")).unwrap();
    fifo("out/w.safetensors");
    let server = home.serve(&["--topic=w=w"]);
    home.run(&["subscribe", server.ticket("w"), "--once", "--out=out"])
        .expect_error(1, &["cannot write out/w.safetensors", "it is a FIFO"]);
    assert!(is_fifo("out/w.safetensors"));
}
