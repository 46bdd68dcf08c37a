//! The contenders, and the choice of those to compare.

use super::place::Role;
use crate::{program::Program, relay::Job};
use anyhow::{Result, ensure};
use std::{
    collections::HashSet,
    ffi::OsString,
    path::{Path, PathBuf},
};

/// A program, or a variant of one, that can be compared.
#[derive(Debug, Clone)]
pub(crate) struct Contender {
    pub(crate) name: String,
    /// The working directory of its processes, if not the current one.
    pub(super) folder: Option<PathBuf>,
    pub(super) serve: SideCommand,
    pub(super) receive: SideCommand,
    /// The number of receiving processes.
    pub(super) receivers: u32,
    /// One more receiving process, which is slow and not measured.
    pub(super) slow: Option<SideCommand>,
    /// Whether the payload is encrypted.
    pub(super) encrypted: bool,
    /// `reused` if the receiving side reuses its memory in each round, `fresh` if it allocates new memory.
    pub(super) receives_into: String,
    /// Remarks on its numbers.
    pub(super) note: String,
    /// Whether it supports small messages.
    pub(super) has_small: bool,
    /// Whether it has a job, whose sides are a producer and its consumers.
    pub(super) has_job: bool,
    /// Whether it is tensor-relay or a variant of it.
    pub(super) is_ours: bool,
    /// Whether it is a program of another project, which may not be installed.
    pub(super) is_external: bool,
}

/// The command of one side: its program, and the arguments before the options of [`contender`](crate::contender).
#[derive(Debug, Clone)]
pub(crate) struct SideCommand {
    pub(super) program: Program,
    pub(super) arguments: Vec<OsString>,
}

/// All contenders, from which [`pick`](Self::pick) chooses.
#[derive(Debug)]
pub(crate) struct Contenders {
    contenders: Vec<Contender>,
}

impl SideCommand {
    /// The command of `program` with the arguments `words`.
    pub(super) fn new(program: &Program, words: &[&str]) -> Self {
        Self { program: program.clone(), arguments: words.iter().map(OsString::from).collect() }
    }
}

impl Contender {
    /// tensor-relay, or a variant of it, with these commands.
    pub(super) fn new(name: &str, serve: SideCommand, receive: SideCommand) -> Self {
        Self {
            name: name.into(),
            folder: None,
            serve,
            receive,
            receivers: 1,
            slow: None,
            encrypted: true,
            receives_into: "reused".into(),
            note: String::new(),
            has_small: true,
            has_job: false,
            is_ours: true,
            is_external: false,
        }
    }

    /// The contender that `program` implements as `subcommand`, with further options for either side.
    fn of(name: &str, program: &Program, subcommand: &str, serve: &[&str], receive: &[&str]) -> Self {
        let side =
            |side, options: &[&str]| SideCommand::new(program, &[&[subcommand, side], options].concat());
        Self {
            encrypted: name != TCP,
            is_ours: subcommand == RELAY_SUBCOMMAND,
            ..Self::new(name, side("serve", serve), side("receive", receive))
        }
    }

    /// tensor-relay with a job. A slow receiver has the option `--slow` in addition.
    pub(crate) fn of_job(name: &str, this: &Program, job: &Job, options: &[&str]) -> Result<Self> {
        let job_option = format!("--job={}", serde_json::to_string(job)?);
        let receive = [&[job_option.as_str()], options].concat();
        let contender = Self::of(name, this, RELAY_SUBCOMMAND, &[&job_option], &receive);
        let mut slow = contender.receive.clone();
        slow.arguments.push("--slow".into());
        Ok(Self { receivers: job.receivers, slow: job.has_slow.then_some(slow), has_job: true, ..contender })
    }

    /// The name of one of its processes, for messages and tables.
    pub(super) fn process_name(&self, role: Role) -> String {
        match (role, self.has_job) {
            (Role::Server, false) => format!("{} serve", self.name),
            (Role::Receiver(_), false) => format!("{} receive", self.name),
            (Role::Server, true) => "producer".into(),
            (Role::Receiver(number), true) => format!("consumer {}", number + 1),
        }
    }

    /// Environment variables added for all processes. tensor-relay and its variants get none: they run as users run
    /// them. The other contenders get the settings that make them fastest.
    pub(super) fn environment(&self) -> Vec<(&'static str, &'static str)> {
        let copies = (!self.is_ours).then_some(NO_REP_MOVSB);
        let memory = self.is_external.then_some(KEEP_FREED_MEMORY);
        copies.into_iter().chain(memory).collect()
    }
}

impl Contenders {
    /// The contenders that `this` program implements, and the tensor-relay of `other_build`, if given.
    pub(crate) fn of_this(this: &Program, other_build: Option<&Path>) -> Self {
        let own = OWN
            .map(|(name, subcommand, serve, receive)| Contender::of(name, this, subcommand, serve, receive));
        let other = other_build.map(|executable| {
            let program = Program::new(executable, &[]);
            Contender::of(OTHER_BUILD, &program, RELAY_SUBCOMMAND, &[], &[])
        });
        Self { contenders: own.into_iter().chain(other).collect() }
    }

    /// Adds `borrowed` with one or both sides in Python. `python` is an interpreter with the package tensor_relay.
    pub(crate) fn extend_with_python(&mut self, this: &Program, python: &Path) {
        let python = Program::new(python, &["-P", "-c", PYTHON_PROGRAM]);
        let in_python = |words: &[&str]| SideCommand::new(&python, words);
        let in_rust = |words: &[&str]| SideCommand::new(this, &[&[RELAY_SUBCOMMAND], words].concat());
        let (serve, receive) = (&["serve"], &["receive"]);
        self.contenders.extend([
            Contender::new("python", in_python(serve), in_python(receive)),
            Contender::new("python-auto-lanes", in_python(serve), in_python(&["receive", AUTO_LANES])),
            Contender::new("python-producer", in_python(serve), in_rust(receive)),
            Contender::new("python-consumer", in_rust(&["serve", BORROW]), in_python(receive)),
        ]);
    }

    /// Adds `peers`. A peer whose name is taken is called `peers/NAME`.
    ///
    /// # Errors
    /// When `peers/NAME` is taken, too.
    pub(crate) fn extend(&mut self, peers: Vec<Contender>) -> Result<()> {
        for mut peer in peers {
            if self.has(&peer.name) || peer.name == ALL {
                peer.name = format!("peers/{}", peer.name);
            }
            ensure!(!self.has(&peer.name), "two peers have the same name: {}", peer.name);
            self.contenders.push(peer);
        }
        Ok(())
    }

    fn has(&self, name: &str) -> bool {
        self.contenders.iter().any(|contender| contender.name == name)
    }

    /// The contenders called `names`, in this order, each once. The name `all` stands for `tensor-relay` and all
    /// contenders that are no variants of it.
    ///
    /// # Errors
    /// When one of the names belongs to no contender.
    pub(crate) fn pick(&self, names: &[String]) -> Result<Vec<Contender>> {
        let mut picked: Vec<Contender> = vec![];
        for name in names {
            let matches = |contender: &&Contender| match name.as_str() {
                ALL => contender.name == RELAY || !contender.is_ours,
                name => contender.name == name,
            };
            let found: Vec<&Contender> = self.contenders.iter().filter(matches).collect();
            ensure!(
                !found.is_empty(),
                "there is no contender called {name:?}; the contenders are {}",
                self.names()
            );
            picked.extend(found.into_iter().cloned());
        }
        let mut seen = HashSet::new();
        picked.retain(|contender| seen.insert(contender.name.clone()));
        Ok(picked)
    }

    fn names(&self) -> String {
        let names: Vec<&str> = self.contenders.iter().map(|contender| contender.name.as_str()).collect();
        format!("{}, and {ALL}; --relay, --python and --peers add more", names.join(", "))
    }
}

pub(crate) const RELAY: &str = "tensor-relay";
pub(crate) const STOCK_QUINN: &str = "stock-quinn";
const TCP: &str = "tcp";
const OTHER_BUILD: &str = "other-build";
const ALL: &str = "all";

/// The subcommand of this program that runs tensor-relay.
const RELAY_SUBCOMMAND: &str = "relay";

/// The serving side's option for tensors that are lent for each round, and hashed when they are sent.
const BORROW: &str = "--hold=borrow";

/// The receiving side's option for an automatic number of lanes.
const AUTO_LANES: &str = "--lanes=0";

/// The contenders of this program: the name, the subcommand, and the options of the serving and the receiving side.
/// Plain `tensor-relay` has one lane, and chooses a codec for each chunk.
const OWN: [(&str, &str, &[&str], &[&str]); 14] = [
    (RELAY, RELAY_SUBCOMMAND, &[], &[]),
    (STOCK_QUINN, "stock-quinn", &[], &[]),
    (TCP, "tcp", &[], &[]),
    ("tcp-tls", "tcp", &["--tls"], &["--tls"]),
    ("10000-tensors", RELAY_SUBCOMMAND, &["--tensors=10000"], &[]),
    ("borrowed", RELAY_SUBCOMMAND, &[BORROW], &[]),
    ("auto-lanes", RELAY_SUBCOMMAND, &[], &[AUTO_LANES]),
    ("2-lanes", RELAY_SUBCOMMAND, &[], &["--lanes=2"]),
    ("4-lanes", RELAY_SUBCOMMAND, &[], &["--lanes=4"]),
    ("8-lanes", RELAY_SUBCOMMAND, &[], &["--lanes=8"]),
    ("raw", RELAY_SUBCOMMAND, &["--codec=raw"], &[]),
    ("bitplanes", RELAY_SUBCOMMAND, &["--codec=bitplanes"], &[]),
    ("planes", RELAY_SUBCOMMAND, &["--codec=planes"], &[]),
    ("zstd", RELAY_SUBCOMMAND, &["--codec=zstd"], &[]),
];

/// The program of the sides in Python.
const PYTHON_PROGRAM: &str = include_str!("../relay/contender.py");

/// Keeps glibc from copying with `rep movsb`. On AMD processors that is several times slower if source and destination
/// have the same offset in their pages; this nearly doubled the CPU time of a receiver over TLS. Other C libraries
/// ignore it.
const NO_REP_MOVSB: (&str, &str) = ("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=1073741824");

/// Makes glibc keep free memory, up to 64 MiB. Returning memory to the system after each piece and allocating it again
/// more than doubled the CPU time of a sender over TLS. The contenders of this program do not need it: they
/// allocate with mimalloc.
const KEEP_FREED_MEMORY: (&str, &str) = ("MALLOC_TRIM_THRESHOLD_", "67108864");

#[cfg(test)]
mod tests {
    use super::*;

    fn contenders() -> Contenders {
        let this = Program::new("bench", &[]);
        let mut contenders = Contenders::of_this(&this, Some(Path::new("old")));
        let zeromq = Contender::of("zeromq", &this, "x", &[], &[]);
        contenders.extend(vec![Contender { is_external: true, ..zeromq }]).unwrap();
        contenders
    }

    fn picked(names: &[&str]) -> Result<Vec<String>> {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        Ok(contenders().pick(&names)?.into_iter().map(|contender| contender.name).collect())
    }

    #[test]
    fn contenders_are_picked_in_order_and_only_once() {
        assert_eq!(picked(&["tcp", "tensor-relay", "tcp"]).unwrap(), ["tcp", "tensor-relay"]);
        assert_eq!(
            picked(&["tcp-tls", "all"]).unwrap(),
            ["tcp-tls", "tensor-relay", "stock-quinn", "tcp", "zeromq"],
            "the contender that was named first stays first"
        );
        assert_eq!(picked(&["other-build"]).unwrap(), ["other-build"]);
    }

    #[test]
    fn all_variants_of_tensor_relay_are_ours() {
        let ours = contenders().contenders.into_iter().filter(|contender| contender.is_ours);
        let names: Vec<String> = ours.map(|contender| contender.name).collect();
        let variants = [
            "10000-tensors",
            "borrowed",
            "auto-lanes",
            "2-lanes",
            "4-lanes",
            "8-lanes",
            "raw",
            "bitplanes",
            "planes",
            "zstd",
        ];
        assert_eq!(names, [&["tensor-relay"], &variants[..], &["other-build"]].concat());
    }

    #[test]
    fn python_can_run_either_side() {
        let mut contenders = contenders();
        contenders.extend_with_python(&Program::new("bench", &[]), Path::new("python3.12"));
        let names = ["python", "python-auto-lanes", "python-producer", "python-consumer"].map(String::from);
        let is_python = |side: &SideCommand| side.program.words().next().unwrap() == "python3.12";
        let sides: Vec<_> = contenders
            .pick(&names)
            .unwrap()
            .iter()
            .map(|c| (is_python(&c.serve), is_python(&c.receive)))
            .collect();
        assert_eq!(sides, [(true, true), (true, true), (true, false), (false, true)]);
        assert!(
            contenders
                .pick(&["all".into()])
                .unwrap()
                .iter()
                .all(|c| !c.name.contains("python"))
        );
    }

    #[test]
    fn the_error_for_an_unknown_name_lists_all_names() {
        let error = picked(&["tcp", "utp"]).unwrap_err().to_string();
        assert!(
            error.contains("\"utp\"") && error.contains("tcp-tls") && error.contains("zeromq"),
            "{error}"
        );
    }

    #[test]
    fn names_are_unique() {
        let mut contenders = contenders();
        let tcp = contenders.pick(&["tcp".into()]).unwrap();
        contenders.extend(tcp.clone()).unwrap();
        assert_eq!(contenders.pick(&["peers/tcp".into()]).unwrap().len(), 1);
        assert!(contenders.extend(tcp).unwrap_err().to_string().contains("peers/tcp"));
    }

    #[test]
    fn subcommands_come_before_options() {
        let tls = contenders().pick(&["tcp-tls".into()]).unwrap().remove(0);
        assert_eq!(tls.serve.arguments, ["tcp", "serve", "--tls"]);
        assert_eq!(tls.receive.arguments, ["tcp", "receive", "--tls"]);
    }

    #[test]
    fn tensor_relay_gets_no_environment_variables() {
        let names = ["tensor-relay", "2-lanes", "stock-quinn", "tcp-tls"].map(str::to_owned);
        let mut contenders = contenders().pick(&names).unwrap();
        contenders.push(Contender { is_external: true, ..contenders[3].clone() });
        let environments: Vec<_> = contenders.iter().map(Contender::environment).collect();
        assert_eq!(
            environments,
            [vec![], vec![], vec![NO_REP_MOVSB], vec![NO_REP_MOVSB], vec![NO_REP_MOVSB, KEEP_FREED_MEMORY]]
        );
    }
}
