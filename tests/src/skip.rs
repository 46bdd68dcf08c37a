//! Skipped tests, which `tests/run` counts and prints.

use std::{env, fmt::Display, fs::OpenOptions, io::Write, thread};

/// Reports that the running test, or its rest, is skipped for `reason`: what this system lacks or forbids, or what runs
/// the test. Prints it, and appends it to the file that `TENSOR_RELAY_TEST_SKIPS` names, because `cargo test` hides what
/// a test prints.
///
/// # Panics
/// If that file cannot be written: a skip that nobody counts would look like a test that passed.
pub fn skip(reason: impl Display) {
    let reason = reason.to_string().replace('\n', " ");
    println!("skipped: {reason}");
    let Some(path) = env::var_os("TENSOR_RELAY_TEST_SKIPS") else { return };
    let thread = thread::current();
    // One write, so that lines of several processes do not mix.
    let line = format!("{reason}\t{}\n", thread.name().unwrap_or("a test"));
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(line.as_bytes()))
        .expect("the file of skipped tests can be written");
}
