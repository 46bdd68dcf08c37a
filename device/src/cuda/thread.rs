//! The engine's thread: the only one that calls the driver.
//!
//! Why one: a context is bound to threads, some driver calls block others, and destructors must not call a driver. So
//! everybody else puts commands into an inbox, and this thread owns the driver's objects.

use std::{
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    copies::Copies,
    devices::DeviceInfo,
    driver::Driver,
    error::CudaError,
    fences::Fences,
    gpu::Gpu,
    holdings::Holdings,
    inbox::{Command, Inbox, Reply},
    options::CudaOptions,
    setting::Setting,
    share::Exported,
    shares::Shares,
    stats::Counters,
    waiters::Waiters,
};
use crate::id::Id;

/// An engine's handle of its thread.
pub(super) struct Started {
    pub(super) info: DeviceInfo,
    pub(super) inbox: Inbox,
    pub(super) counters: Arc<Counters>,
    pub(super) waiters: Waiters,
}

/// Starts the thread of an engine, and waits until it has opened the device.
pub(super) fn start(
    driver: Driver,
    ordinal: usize,
    engine: Id,
    options: &CudaOptions,
) -> Result<Started, CudaError> {
    let device: Arc<str> = format!("cuda:{ordinal}").into();
    let no_thread =
        |error: io::Error| CudaError::NoThread { device: device.to_string(), reason: error.to_string() };
    // Longer than every wait of the thread itself.
    let patience = options.fence_timeout + 2 * options.copy_timeout;
    let waiters = Waiters::watch(Arc::clone(&device), patience).map_err(no_thread)?;
    let (sender, commands) = mpsc::channel();
    let inbox = Inbox::new(sender, Arc::clone(&device), options.answer_timeout);
    let counters = Arc::new(Counters::default());
    let (opened, answer) = mpsc::sync_channel(1);
    let setting =
        Setting { engine, options: options.clone(), inbox: inbox.clone(), counters: Arc::clone(&counters) };
    thread::Builder::new()
        .name(format!("relay-{device}"))
        .spawn(move || run(driver, ordinal, setting, &commands, &opened))
        .map_err(no_thread)?;
    let waited = options.answer_timeout;
    let opened = answer.recv_timeout(waited).unwrap_or_else(|missing| {
        let device = device.to_string();
        Err(match missing {
            RecvTimeoutError::Timeout => CudaError::NoAnswer { device, waited },
            RecvTimeoutError::Disconnected => CudaError::Stopped { device },
        })
    });
    if opened.is_err() {
        // If it still opens, nobody will use it.
        let _ = inbox.tell(Command::Close);
    }
    opened.map(|info| Started { info, inbox, counters, waiters })
}

fn run(
    driver: Driver,
    ordinal: usize,
    setting: Setting,
    commands: &Receiver<Command>,
    opened: &Reply<Result<DeviceInfo, CudaError>>,
) {
    let _open = Open::count();
    let info = DeviceInfo::ask(&driver, ordinal);
    match info.and_then(|info| Ok((Gpu::open(driver, ordinal, &setting.inbox)?, info))) {
        Ok((gpu, info)) => {
            // If the caller gave up, `Close` is in the inbox.
            let _ = opened.send(Ok(info));
            Worker::new(gpu, setting).run(commands);
        }
        Err(error) => {
            let _ = opened.send(Err(error));
        }
    }
}

/// The thread's state: the device and its pending work.
///
/// If the thread panics, dropping this frees nothing that the device may still use: slots and memory of copies in
/// flight are leaked, and no destructor here calls the driver.
struct Worker {
    gpu: Gpu,
    setting: Setting,
    copies: Copies,
    fences: Fences,
    holdings: Holdings,
    shares: Shares,
    /// The device failure: later commands are refused with it.
    failed: Option<CudaError>,
    /// When the engine was dropped.
    closed: Option<Instant>,
}

impl Worker {
    fn new(gpu: Gpu, setting: Setting) -> Self {
        let copies = Copies::new(&setting.options);
        let holdings = Holdings::new(&setting.options);
        let (fences, shares) = (Fences::default(), Shares::new(&setting.options));
        Self { gpu, setting, copies, fences, holdings, shares, failed: None, closed: None }
    }

    fn run(mut self, commands: &Receiver<Command>) {
        while !self.is_done() {
            if let Some(command) = self.next(commands) {
                self.handle(command);
            }
            // All commands of a moment are handled before anything is polled.
            commands.try_iter().take(AT_ONCE).for_each(|command| self.handle(command));
            self.look(Instant::now());
        }
        self.end();
    }

    /// Waits for a command, or for the next time to poll.
    fn next(&self, commands: &Receiver<Command>) -> Option<Command> {
        match self.wake_at() {
            Some(at) => commands.recv_timeout(at.saturating_duration_since(Instant::now())).ok(),
            // This thread has an inbox itself, so the channel does not close.
            None => commands.recv().ok(),
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        // Once the engine is dropped, memory used only by a caller's stream has a deadline, which the next check after
        // it settles, so this is in the future. Open fences have a deadline too (`is_done`), but not here: once past,
        // it would keep this thread awake for as long as memory is held; and they are polled all the time.
        let last = self.closed.and_then(|_| self.holdings.wake_at());
        let all = [self.copies.wake_at(), self.fences.wake_at(), self.shares.wake_at(), last];
        all.into_iter().flatten().min()
    }

    fn handle(&mut self, command: Command) {
        let Self { gpu, setting, copies, fences, holdings, shares, failed, .. } = self;
        match command {
            Command::Copy(job) => match failed {
                Some(error) => copies.refuse(job, error, setting),
                None => copies.start(job, gpu, setting),
            },
            Command::Rang(direction) => {
                setting.counters.rings.add(1);
                copies.rang(direction);
            }
            Command::Allocate(len, reply) => {
                // Memory returned before this request makes room for it.
                holdings.look(Instant::now(), gpu, setting, failed.is_some(), false);
                let memory = holdings.allocate(len, gpu, setting, failed.as_ref());
                let _ = reply.send(memory); // Nobody waits any more: it is dropped, and comes back.
            }
            Command::Lock(len, reply) => {
                let locked = holdings.lock(len, gpu, setting, failed.as_ref());
                let _ = reply.send(locked);
            }
            Command::Buffer(len, reply) => {
                holdings.look(Instant::now(), gpu, setting, failed.is_some(), false);
                let buffer = match failed {
                    Some(error) => Err(error.clone().into()),
                    None => holdings.buffer(len, gpu, setting),
                };
                let _ = reply.send(buffer); // Nobody waits any more: it is dropped, and comes back.
            }
            Command::Import(exported, reply) => {
                let imported = match (failed, &exported) {
                    (Some(error), _) => Err(error.clone().into()),
                    (None, Exported::Fd(shared)) => holdings.import_fd(shared, gpu, setting),
                    (None, Exported::Ipc(shared)) => holdings.import_ipc(shared, gpu, setting),
                };
                let _ = reply.send(imported); // Nobody waits any more: it is dropped, and comes back.
            }
            Command::Share(wish) => match failed {
                Some(error) => wish.refuse(error.clone().into()),
                None => shares.start(wish, gpu, setting),
            },
            Command::TakeBack(holding, until) => holdings.take_back(holding, until),
            Command::GiveUp(memory, streams) => {
                for stream in streams {
                    let fence = match failed {
                        Some(error) => Err(error.clone()),
                        None => fences.record(&stream, gpu, setting),
                    };
                    // If a stream's progress is unknown, the memory is leaked.
                    memory.hold_for(fence.unwrap_or_else(|error| fences.lost(error, setting)));
                }
            }
            Command::Unlock(mapping) => holdings.unlock(mapping, gpu, setting, failed.is_some()),
            Command::Fence(stream, reply) => {
                let fence = match failed {
                    Some(error) => Err(error.clone()),
                    None => fences.record(&stream, gpu, setting),
                };
                let _ = reply.send(fence);
            }
            Command::Intake(reply) => {
                let intake = match failed {
                    Some(error) => Err(error.clone()),
                    None => gpu.intake().map(|stream| stream.expose_provenance()).map_err(CudaError::from),
                };
                let _ = reply.send(intake);
            }
            Command::FenceIntake(reply) => {
                let fence = match failed {
                    Some(error) => Err(error.clone()),
                    None => fences.record_intake(gpu, setting),
                };
                let _ = reply.send(fence);
            }
            Command::WaitFence(id, stream, reply) => {
                let ordered = match failed {
                    Some(error) => Err(error.clone()),
                    None => fences.order(id, &stream, gpu),
                };
                let _ = reply.send(ordered);
            }
            Command::DropFence(id) => fences.drop_fence(id, gpu),
            Command::WaitMemory(memory, stream, reply) => match failed {
                Some(error) => {
                    let _ = reply.send(Err(error.clone()));
                }
                None => copies.order_later(memory, stream, reply),
            },
            Command::Close => self.closed = Some(Instant::now()),
        }
    }

    /// Does what is due, whether or not a command came.
    fn look(&mut self, now: Instant) {
        let Self { gpu, setting, copies, fences, holdings, shares, failed, closed } = self;
        if fences.look(now, gpu) {
            copies.suspect();
        }
        if failed.is_none() {
            copies.start_waiting(now, gpu, setting);
            let looked = copies.look(now, gpu, setting);
            if let Err(error) = looked.and_then(|()| shares.look(now, gpu, setting)) {
                // Set here alone.
                let _ = setting.counters.failure.set(error.clone());
                *failed = Some(error);
            }
        }
        if let Some(error) = failed {
            copies.fail(error, gpu, setting);
            shares.fail(error, gpu, setting);
            fences.fail(error);
        }
        copies.order_streams(gpu);
        holdings.look(now, gpu, setting, failed.is_some(), closed.is_some());
    }

    /// Whether the engine was dropped and everything given out is returned or, after a failure, what can be.
    fn is_done(&self) -> bool {
        let Some(closed) = self.closed else { return false };
        let fenced = !self.fences.is_empty() && closed.elapsed() < self.setting.options.last_wait();
        let all_back = self.holdings.are_back() && !fenced;
        self.copies.are_over() && self.shares.are_over() && (self.failed.is_some() || all_back)
    }

    /// Releases the device. If it failed, or memory was leaked, its context is leaked too, since the memory may be in
    /// use.
    fn end(self) {
        let Self { gpu, setting, holdings, failed, .. } = self;
        if failed.is_none() && holdings.free_all(&gpu, &setting) {
            gpu.close();
        }
    }
}

/// The most commands handled between two polls.
const AT_ONCE: usize = 256;

/// Waits until the threads of all engines of this process have ended; returns whether they did within `timeout`.
///
/// For the end of a program: an engine's thread releases the device after the engine is dropped, and a process that
/// exits before that leaves the cleanup to the driver.
pub fn all_closed(timeout: Duration) -> bool {
    let until = Instant::now() + timeout;
    let mut open = Open::number();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if *open == 0 || left.is_zero() {
            return *open == 0;
        }
        let waited = ENDED.wait_timeout(open, left);
        open = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Counts an engine's thread while it runs.
struct Open;

static OPEN: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

impl Open {
    fn count() -> Self {
        *Self::number() += 1;
        Self
    }

    fn number() -> MutexGuard<'static, usize> {
        OPEN.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        *Self::number() -= 1;
        ENDED.notify_all();
    }
}
