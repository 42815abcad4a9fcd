//! A VAR, which is a doorbell page of an emulated virtio device, in two processes. This one allocates it and describes
//! it by an envelope. The other process, which is started with the context's file as its input, imports it and rings a
//! doorbell there. So a monitor can hand the doorbells of a device to the process that emulates it.

use std::env;
use std::io::stdin;
use std::os::fd::AsFd;
use std::process::{Command, ExitCode, Stdio};
use uverbs::mlx5::{Var, VarKind};
use uverbs::{Context, Envelope};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The value that is stored. A device would take it for the number of the virtqueue.
const QUEUE: u32 = 3;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let ended = match &arguments[..] {
        [] => allocate(),
        [import, envelope] if import == "import" => self::import(envelope),
        _ => Err("shared_var takes no arguments".into()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn allocate() -> Result<()> {
    let context = Context::open_first()?;
    let var = Var::alloc(&context, VarKind::Virtio)?;
    let page = var.map()?;
    let envelope: String =
        var.export()?.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    // The file grants access to all objects of the context: the process that gets it is trusted with them.
    let status = Command::new(env::current_exe()?)
        .args(["import", &envelope])
        .stdin(Stdio::from(context.share()?))
        .status()?;
    if !status.success() {
        return Err("the other process failed".into());
    }
    println!("page {} was rung with {}", var.page_id(), page.peek_u32(0)?);
    // An import never destroys the VAR, unless it became the VAR's owner.
    var.destroy()?;
    Ok(())
}

fn import(envelope: &str) -> Result<()> {
    let context = Context::import(stdin().as_fd().try_clone_to_owned()?)?;
    let digits = envelope.as_bytes().chunks(2).map(|two| {
        let two = std::str::from_utf8(two)?;
        Ok(u8::from_str_radix(two, 16)?)
    });
    let bytes = digits.collect::<Result<Vec<u8>>>()?;
    let envelope = Envelope::from_bytes(&bytes)?;
    // SAFETY: the process that started this one exported it a moment ago, and waits before it destroys
    // the VAR.
    let var = unsafe { Var::import(&context, &envelope) }?;
    var.map()?.ring_u32(0, QUEUE)?;
    println!("rang queue {QUEUE} in page {}, {} bytes", var.page_id(), var.len());
    Ok(())
}
