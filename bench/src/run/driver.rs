//! The driver, which sends orders to the workers and collects their reports, round by round.

use super::{
    address::NodeAddress,
    checks,
    document::{COPIES, Details, Machine, NetworkFacts, WorkloadFacts},
    results::{MeasuredScene, Sample, tables},
    workers::Workers,
    workload::{Plan, Scene},
};
use crate::{
    cells::Cells,
    node::{
        Hold,
        load::{Form, Load},
        order::{
            ConsumerJob, Introduction, Order, Prepared, ProducerJob, Received, Report, Round, Sent, Work,
        },
    },
    results::Results,
    table::{Row, Table},
};
use anyhow::{Context, Result};
use std::time::Duration;
use tensor_relay_client::Ticket;

/// The settings of the driver.
pub(super) struct Settings {
    pub(super) name: &'static str,
    pub(super) plan: Plan,
    pub(super) rounds: u32,
    pub(super) hold: Hold,
    pub(super) udp_payload_max: u16,
    /// The number of lanes of each consumer.
    pub(super) lanes: u32,
    /// The host at which consumers reach the producer, if it is not that of the producer's ticket. Its port is ignored.
    pub(super) serve_at: Option<NodeAddress>,
    /// The deadline of each step, if the user set it.
    pub(super) deadline: Option<Duration>,
}

/// The deadline for starting, connecting and ending.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

/// The deadline for generating a version. A producer that exits is noticed at once.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(600);

/// The part of a round's deadline that does not depend on its bytes and its timetable.
const ROUND_TIMEOUT_MARGIN: Duration = Duration::from_secs(60);

/// The rate of the slowest network for which the default deadline of a round suffices.
const SLOWEST_BYTES_PER_S: u64 = 10_000_000;

/// The worker number of the producer. The numbers of consumers follow.
const PRODUCER: usize = 0;

/// The driver of a run. Its first worker is the producer.
pub(super) struct Driver {
    workers: Workers,
    settings: Settings,
    /// The worker numbers of the consumers.
    consumers: Vec<usize>,
    /// The number of rounds begun so far.
    rounds_begun: u32,
}

/// The introduction of each worker, by its number.
type Introductions = Vec<Introduction>;

impl Driver {
    pub(super) fn new(workers: Workers, settings: Settings) -> Self {
        Self { consumers: (PRODUCER + 1..workers.len()).collect(), workers, settings, rounds_begun: 0 }
    }

    /// Runs all rounds. Scenes alternate round by round, because a machine's speed drifts: only neighbouring rounds are
    /// compared.
    ///
    /// # Errors
    /// When a worker fails, disconnects, reports impossible numbers or misses a deadline; the error names the worker.
    pub(super) async fn measure(mut self, network: NetworkFacts) -> Result<Results<Details>> {
        let introductions = self.receive_introductions().await?;
        self.assign_jobs().await?;
        let scenes = self.settings.plan.scenes.clone();
        let mut measured_scenes: Vec<MeasuredScene> =
            scenes.iter().map(|scene| self.measured_scene(scene, &introductions)).collect();
        for scene in &scenes {
            self.run_round(scene, &format!("warm-up, {}", scene.name), self.settings.plan.warm_up_versions())
                .await?;
        }
        for number in 1..=self.settings.rounds {
            for (scene, measured_scene) in scenes.iter().zip(&mut measured_scenes) {
                let title = format!("round {number} of {}, {}", self.settings.rounds, scene.name);
                let sample = self.run_round(scene, &title, self.settings.plan.versions).await?;
                eprintln!("{title}: {:.3} GB/s", sample.gb_per_s());
                measured_scene.samples.push(sample);
            }
        }
        let memory = self.end_workers(&measured_scenes).await?;
        Ok(self.results(network, &introductions, measured_scenes, memory))
    }

    /// Waits until all workers run and have introduced themselves.
    async fn receive_introductions(&mut self) -> Result<Introductions> {
        let all: Vec<usize> = (0..self.workers.len()).collect();
        let introduced =
            self.workers
                .gather(&all, "introduced", self.step_timeout(), |report| match report {
                    Report::Introduced(introduction) => Some(introduction),
                    _ => None,
                });
        introduced.await
    }

    /// Starts the producer's server, and connects the consumers to it.
    async fn assign_jobs(&mut self) -> Result<()> {
        let Settings { plan, hold, udp_payload_max, lanes, .. } = &self.settings;
        let (work, every) = (plan.work.clone(), plan.every);
        let (udp_payload_max, lanes) = (Some(*udp_payload_max), *lanes);
        let job = ProducerJob { work: work.clone(), hold: *hold, udp_payload_max, every };
        self.workers.send(&[PRODUCER], &Order::Produce(job)).await?;
        let tickets =
            self.workers
                .gather(&[PRODUCER], "serving", self.step_timeout(), |report| match report {
                    Report::Serving { ticket } => Some(ticket),
                    _ => None,
                });
        let text = tickets.await?.concat();
        let ticket = self
            .reachable_ticket(&text)
            .with_context(|| format!("{} reported an invalid ticket", self.workers.name(PRODUCER)))?;
        for consumer in self.consumers.clone() {
            let slow = self
                .settings
                .plan
                .scenes
                .iter()
                .any(|scene| scene.slow.map(worker_of) == Some(consumer));
            let ticket = ticket.to_string();
            let job = ConsumerJob { ticket, work: work.clone(), udp_payload_max, lanes, every, slow };
            self.workers.send(&[consumer], &Order::Consume(job)).await?;
        }
        let connected = self
            .workers
            .gather(&self.consumers, "connected", self.step_timeout(), |report| match report {
                Report::Connected => Some(()),
                _ => None,
            });
        connected.await.map(|_| ())
    }

    /// The ticket that the producer `reported`. If [`Settings::serve_at`] is set, its host replaces the ticket's.
    fn reachable_ticket(&self, reported: &str) -> Result<Ticket> {
        let ticket: Ticket = reported.parse()?;
        let Some(host) = &self.settings.serve_at else { return Ok(ticket) };
        let address = ticket.addresses().first().context("it names no address")?;
        let port = address.rsplit_once(':').context("its address has no port")?.1.parse()?;
        let address = host.with_port(port).to_string();
        Ok(Ticket::new(vec![address], ticket.keys().to_vec(), ticket.topic().cloned())?)
    }

    /// Prepares, runs and checks one round of `scene`.
    async fn run_round(&mut self, scene: &Scene, title: &str, versions: u64) -> Result<Sample> {
        let readers: Vec<usize> = scene.readers.iter().copied().map(worker_of).collect();
        let slow: Vec<usize> = scene.slow.map(worker_of).into_iter().collect();
        let consumers = [&readers[..], &slow].concat();
        self.rounds_begun += 1;
        let round = Round { number: self.rounds_begun, readers: readers.len() as u32, versions };
        let prepared = self.prepare(round, &consumers).await?;

        let commit_timeout = self.commit_timeout(&prepared, round);
        self.workers.start_progress(
            title.into(),
            prepared.payload_bytes.saturating_mul(versions),
            &consumers,
        );
        let begin = Order::Begin { round: round.number, commit_timeout_s: commit_timeout.as_secs() };
        // Consumers first: they usually wait already when the producer publishes.
        self.workers.send(&consumers, &begin).await?;
        self.workers.send(&[PRODUCER], &begin).await?;
        let (sent, received) = self.round_reports(&readers, commit_timeout).await?;
        self.workers.stop_progress();

        let producer = self.workers.name(PRODUCER);
        checks::check_sent(&sent, round).with_context(|| producer.to_owned())?;
        for (reader, received) in readers.iter().zip(&received) {
            let name = || self.workers.name(*reader).to_owned();
            checks::check_received(received, &prepared, round).with_context(name)?;
        }
        self.stop(&slow, round).await?;
        Ok(Sample { scene: scene.name.clone(), prepared, sent, received })
    }

    /// Makes the producer prepare the round, and then `consumers` subscribe. Returns when all of them are ready.
    async fn prepare(&mut self, round: Round, consumers: &[usize]) -> Result<Prepared> {
        let deadline = self.settings.deadline.unwrap_or(PREPARE_TIMEOUT);
        self.workers.send(&[PRODUCER], &Order::Prepare(round)).await?;
        let prepared = self.workers.gather(&[PRODUCER], "prepared", deadline, |report| match report {
            Report::Prepared(prepared) => Some(prepared),
            _ => None,
        });
        let prepared = prepared.await?.pop().context("gather returned nothing")?;
        checks::check_prepared(&prepared, round).with_context(|| self.workers.name(PRODUCER).to_owned())?;
        self.workers.send(consumers, &Order::Prepare(round)).await?;
        let subscribed =
            self.workers
                .gather(consumers, "subscribed", self.step_timeout(), |report| match report {
                    Report::Subscribed { round: number } if number == round.number => Some(()),
                    _ => None,
                });
        subscribed.await?;
        Ok(prepared)
    }

    /// Waits for the reports of the producer and the readers at the end of a round, in any order.
    async fn round_reports(
        &mut self,
        readers: &[usize],
        commit_timeout: Duration,
    ) -> Result<(Sent, Vec<Received>)> {
        enum RoundReport {
            Sent(Sent),
            Received(Received),
        }
        let all = [&[PRODUCER], readers].concat();
        // Later than the producer's own deadline, whose error says how many consumers committed.
        let deadline = commit_timeout + STEP_TIMEOUT;
        let reports = self.workers.gather(&all, "sent or received", deadline, |report| match report {
            Report::Sent(sent) => Some(RoundReport::Sent(sent)),
            Report::Received(received) => Some(RoundReport::Received(received)),
            _ => None,
        });
        let (mut sent, mut received) = (None, Vec::new());
        for (worker, report) in all.iter().zip(reports.await?) {
            match (*worker, report) {
                (PRODUCER, RoundReport::Sent(measured)) => sent = Some(measured),
                (PRODUCER, RoundReport::Received(_)) => break,
                (_, RoundReport::Received(measured)) => received.push(measured),
                (_, RoundReport::Sent(_)) => break,
            }
        }
        let all_reports = sent.filter(|_| received.len() == readers.len()).map(|sent| (sent, received));
        all_reports.context(
            "a consumer reported that it published, or the producer that it received: run the same build on all hosts",
        )
    }

    /// Stops the slow readers, which receive until this order.
    async fn stop(&mut self, slow: &[usize], round: Round) -> Result<()> {
        self.workers.send(slow, &Order::Stop { round: round.number }).await?;
        let stopped = self
            .workers
            .gather(slow, "stopped", self.step_timeout(), |report| match report {
                Report::Stopped { round: number, .. } if number == round.number => Some(()),
                _ => None,
            });
        stopped.await.map(|_| ())
    }

    /// Ends all workers, the producer last, and returns a table of their peak memory.
    async fn end_workers(&mut self, measured_scenes: &[MeasuredScene]) -> Result<Table> {
        let samples = measured_scenes.iter().flat_map(|measured_scene| &measured_scene.samples);
        let version_bytes = samples.map(|sample| sample.prepared.payload_bytes).max().unwrap_or(0);
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let mut rows = Vec::new();
        for workers in [self.consumers.clone(), vec![PRODUCER]] {
            self.workers.send(&workers, &Order::End).await?;
            let peaks = self
                .workers
                .gather(&workers, "ended", self.step_timeout(), |report| match report {
                    Report::Ended { peak_resident_bytes } => Some(peak_resident_bytes),
                    _ => None,
                });
            for (worker, peak) in workers.iter().zip(peaks.await?) {
                let setting = Cells::of([("worker", self.workers.name(*worker).to_owned())]);
                // A worker whose kernel does not report its peak has no cells.
                let memory = Cells::default()
                    .and("peak_resident_mib", peak.map(mib))
                    .and("beyond_a_version_mib", peak.map(|peak| mib(peak.saturating_sub(version_bytes))));
                rows.push(Row::of(setting, [&memory]));
            }
        }
        Ok(Table::new("Memory", rows))
    }

    fn measured_scene(&self, scene: &Scene, introductions: &Introductions) -> MeasuredScene {
        let readers = || scene.readers.iter().copied().map(worker_of);
        let has_clock_of_producer = |reader: usize| {
            Machine::new("", &introductions[reader], &introductions[PRODUCER]).clock_of_producer
        };
        MeasuredScene {
            name: scene.name.clone(),
            readers: readers().map(|reader| self.workers.name(reader).into()).collect(),
            one_clock: readers().all(has_clock_of_producer),
            is_stream: matches!(self.settings.plan.work, Work::Stream { .. }),
            samples: Vec::new(),
        }
    }

    fn results(
        &self,
        network: NetworkFacts,
        introductions: &Introductions,
        measured_scenes: Vec<MeasuredScene>,
        memory: Table,
    ) -> Results<Details> {
        let Settings { name, plan, rounds, hold, lanes, .. } = &self.settings;
        let machine = |w| Machine::new(self.workers.name(w), &introductions[w], &introductions[PRODUCER]);
        let title = format!("Workload {name}, over {network}");
        let about = format!(
            "tensor-relay alone; medians over {rounds} rounds (minimum to maximum); ratios of each scene to the first, round \
             by round, with the confidence interval of their median."
        );
        let mut tables = tables(&measured_scenes);
        tables.push(memory);
        let details = Details {
            network,
            workload: WorkloadFacts {
                name,
                work: without_folder(&plan.work),
                versions_per_round: plan.versions,
                mode: if plan.every { "every" } else { "latest" },
                hold: *hold,
                lanes: *lanes,
                rounds: *rounds,
                warm_up_rounds: 1,
            },
            machines: (0..self.workers.len()).map(machine).collect(),
            rounds: measured_scenes
                .into_iter()
                .flat_map(|measured_scene| measured_scene.samples)
                .collect(),
            copies_per_byte: COPIES,
        };
        let mut results = Results::new("run", title, about, details);
        results.tables = tables;
        results
    }

    fn step_timeout(&self) -> Duration {
        self.settings.deadline.unwrap_or(STEP_TIMEOUT)
    }

    /// The time within which the producer expects the commits of `round`, from the round's bytes and timetable.
    fn commit_timeout(&self, prepared: &Prepared, round: Round) -> Duration {
        self.settings.deadline.unwrap_or_else(|| {
            let bytes = prepared.payload_bytes.saturating_mul(round.versions);
            let bytes = bytes.saturating_mul(round.readers.into());
            let seconds = 2 * self.settings.plan.timetable_s() + bytes / SLOWEST_BYTES_PER_S;
            ROUND_TIMEOUT_MARGIN + Duration::from_secs(seconds)
        })
    }
}

/// The worker number of a consumer. Plans number consumers from 0.
fn worker_of(consumer: usize) -> usize {
    PRODUCER + 1 + consumer
}

/// `work` for the result file, with only the name of its file, because the folder may be private.
fn without_folder(work: &Work) -> Work {
    match work {
        Work::Version(Load { form: Form::File { path }, content }) => {
            let path = path.file_name().map(Into::into).unwrap_or_default();
            Work::Version(Load { form: Form::File { path }, content: *content })
        }
        other => other.clone(),
    }
}
