//! What the program asks of the machine that it runs on, and says when it does not get it: open files.

use crate::files;
use std::process::Command;
use tensor_relay_tests::processes::{ANY_PORT, Home, Process, Serving};

/// A folder with the model `w` in it.
fn home() -> Home {
    let home = Home::new();
    files::noise(&home.path("w"), 1000, 1);
    home
}

/// Starts the program with `words` from a shell that runs `first`.
fn start_after(home: &Home, first: &str, words: &[&str]) -> Process {
    let mut shell = home.at_home(Command::new("sh"));
    shell.args(["-c", &format!("{first}; exec \"$@\""), "sh"]);
    shell.arg(home.program().get_program()).args(words);
    Process::start(shell)
}

/// Goal: too few descriptors are told in a sentence with the numbers, whatever the number; a soft limit alone is raised.
/// Method: every hard limit from the fewest that let a program start at all up to more than is needed; then a soft limit.
#[test]
fn too_few_descriptors() {
    let home = home();
    let words = ["serve", "--json", ANY_PORT, "--topic=w=w", "--publish-socket=s"];
    let mut limit = 5;
    let serving = loop {
        let mut server = start_after(&home, &format!("ulimit -n {limit}"), &words);
        if server.try_hear_out("serving") {
            break server;
        }
        server.end().failed(1, &["files and sockets", "ulimit -n"]);
        limit += 1;
        assert!(limit < 100, "it needs less than that");
    };
    drop(serving);
    for words in [&["list", "relay://x"][..], &["keys", "show"], &["subscribe", "relay://x"]] {
        start_after(&home, "ulimit -n 6", words).end().failed(1, &["files and sockets"]);
    }
    let server = Serving::hear(start_after(&home, "ulimit -S -n 8", &words));
    home.run(&["subscribe", server.ticket("w"), "--once"]).with(0);
    let ended = start_after(
        &home,
        &format!("ulimit -n {limit}"),
        &["subscribe", server.ticket("w"), "--once", "--out=o"],
    );
    ended.end().with(0);
}
