//! Exchanges with a scripted kernel.

use super::*;
use std::collections::VecDeque;

/// A kernel that answers from a script and records the requests.
#[derive(Default)]
pub(in crate::device) struct Script {
    pub(in crate::device) sent: Vec<Vec<u8>>,
    replies: VecDeque<rustix::io::Result<Vec<u8>>>,
}

impl Script {
    pub(in crate::device) fn reply(mut self, datagram: impl Into<Vec<u8>>) -> Self {
        self.replies.push_back(Ok(datagram.into()));
        self
    }

    fn fail(mut self, errno: Errno) -> Self {
        self.replies.push_back(Err(errno));
        self
    }
}

impl NetlinkTransport for &mut Script {
    fn send(&mut self, datagram: &[u8]) -> rustix::io::Result<()> {
        self.sent.push(datagram.to_vec());
        Ok(())
    }

    fn receive(&mut self, datagram: &mut Vec<u8>) -> rustix::io::Result<()> {
        *datagram = self.replies.pop_front().unwrap_or(Err(Errno::AGAIN))?;
        Ok(())
    }
}

/// One message in the machine's byte order, padded.
pub(in crate::device) fn message(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&(16 + payload.len() as u32).to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(&flags.to_ne_bytes());
    bytes.extend_from_slice(&sequence.to_ne_bytes());
    bytes.extend_from_slice(&0u32.to_ne_bytes());
    bytes.extend_from_slice(payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// One attribute in the machine's byte order, padded.
pub(in crate::device) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

const DATA: u16 = 0x1401;
const MULTI: u16 = NLM_F_MULTIPART;

fn number(value: u32) -> Vec<u8> {
    attribute(1, &value.to_ne_bytes())
}

fn error(sequence: u32, status: i32) -> Vec<u8> {
    let mut payload = status.to_ne_bytes().to_vec();
    payload.extend_from_slice(&[0; 16]);
    message(NLMSG_ERROR, 0, sequence, &payload)
}

fn end(sequence: u32) -> Vec<u8> {
    message(NLMSG_DONE, MULTI, sequence, &0i32.to_ne_bytes())
}

fn first_number(attributes: Attributes<'_>) -> std::result::Result<u64, Malformed> {
    attributes.iter().next().ok_or(Malformed("nothing"))??.1.number()
}

fn dump(script: &mut Script) -> Result<Vec<u64>> {
    Client::new(script, "list_devices").dump(&Request::new(1), first_number)
}

fn ask(script: &mut Script) -> Result<u64> {
    Client::new(script, "query_system").ask(&Request::new(6), first_number)
}

#[test]
#[cfg(target_endian = "little")]
fn requests_have_the_bytes_that_the_kernel_wants() {
    let request = Request::new(15).number(1, 0x01020304).string(69, "uverbs");
    #[rustfmt::skip]
    let expected = [
        36, 0, 0, 0, // length: header, 8, 12
        15, 0x14, // RDMA_NL_NLDEV << 10 | RDMA_NLDEV_CMD_GET_CHARDEV
        5, 0, // NLM_F_REQUEST | NLM_F_ACK
        9, 0, 0, 0, // sequence
        0, 0, 0, 0, // port
        8, 0, 1, 0, 4, 3, 2, 1,
        11, 0, 69, 0, b'u', b'v', b'e', b'r', b'b', b's', 0, 0,
    ];
    assert_eq!(request.datagram(NLM_F_ACK, 9), expected);
}

fn ask_each(script: &mut Script, count: usize) -> Result<Vec<Result<u64>>> {
    let requests: Vec<_> = (0..count).map(|_| Request::new(15)).collect();
    Client::new(script, "list_devices").ask_each(&requests, first_number)
}

/// Answers come in any order, and some are errors; a message that answers no request is skipped.
#[test]
fn questions_go_together() {
    let mut two = message(DATA, 0, 3, &number(30));
    two.extend(message(DATA, 0, 9, &number(90)));
    let mut script = Script::default()
        .reply(two)
        .reply(error(2, -22))
        .reply(message(DATA, 0, 3, &number(31)))
        .reply(message(DATA, 0, 1, &number(10)));
    let answers = ask_each(&mut script, 3).unwrap();
    let told = |answer: &Result<u64>| answer.as_ref().map_err(Error::errno).copied();
    let answers: Vec<_> = answers.iter().map(told).collect();
    assert_eq!(answers, [Ok(10), Err(Errno::INVAL), Ok(30)]);
    assert_eq!(script.sent.len(), 1);
    assert_eq!(script.sent[0].len(), 3 * 16);
    assert_eq!(script.sent[0][24], 2, "the second header begins with the second question's number");
}

#[test]
fn no_more_requests_share_a_datagram_than_answers_fit() {
    let mut script = Script::default();
    for sequence in 1..=TOGETHER as u32 + 1 {
        script = script.reply(message(DATA, 0, sequence, &number(sequence)));
    }
    assert_eq!(ask_each(&mut script, TOGETHER + 1).unwrap().len(), TOGETHER + 1);
    assert_eq!(script.sent.len(), 2);
    assert!(ask_each(&mut Script::default(), 0).unwrap().is_empty());
    let mut script = Script::default().reply(message(DATA, 0, 1, &number(1)));
    assert_eq!(ask_each(&mut script, 2).unwrap_err().errno(), Errno::TIMEDOUT);
}

#[test]
fn a_dump_spans_messages_and_datagrams() {
    let mut first = message(DATA, MULTI, 1, &number(10));
    first.extend(message(DATA, MULTI, 1, &number(11)));
    let mut second = message(DATA, MULTI, 1, &number(12));
    second.extend(end(1));
    let mut script = Script::default().reply(first).reply(second);
    assert_eq!(dump(&mut script).unwrap(), [10, 11, 12]);
    let flags = u16::from_ne_bytes([script.sent[0][6], script.sent[0][7]]);
    assert_eq!(flags, NLM_F_REQUEST | NLM_F_DUMP);
}

#[test]
fn an_empty_dump_is_empty() {
    assert_eq!(dump(&mut Script::default().reply(end(1))).unwrap(), []);
    let bare = message(NLMSG_DONE, MULTI, 1, &[]);
    assert_eq!(dump(&mut Script::default().reply(bare)).unwrap(), []);
}

#[test]
fn an_interrupted_dump_is_started_afresh() {
    let mut torn = message(DATA, MULTI | NLM_F_DUMP_INTR, 1, &number(10));
    torn.extend(end(1));
    let mut whole = message(DATA, MULTI, 2, &number(20));
    whole.extend(end(2));
    let mut script = Script::default().reply(torn).reply(whole);
    assert_eq!(dump(&mut script).unwrap(), [20]);
    assert_eq!(script.sent.len(), 2);
}

#[test]
fn a_dump_that_overran_is_started_afresh() {
    let mut script = Script::default()
        .reply(message(DATA, MULTI, 1, &number(10)))
        .fail(Errno::NOBUFS)
        .reply(end(1))
        .reply(message(DATA, MULTI, 2, &number(20)))
        .reply(end(2));
    assert_eq!(dump(&mut script).unwrap(), [20]);
}

#[test]
fn a_dump_that_never_settles_is_given_up() {
    let mut script = Script::default();
    for sequence in 1..=DUMP_ATTEMPTS {
        script = script.reply(message(NLMSG_DONE, MULTI | NLM_F_DUMP_INTR, sequence, &[]));
    }
    let error = dump(&mut script).unwrap_err();
    assert_eq!(error.errno(), Errno::AGAIN);
    assert_eq!(script.sent.len(), DUMP_ATTEMPTS as usize);
}

#[test]
fn a_dump_may_fail_at_its_end() {
    let failure = message(NLMSG_DONE, MULTI, 1, &(-105i32).to_ne_bytes());
    let error = dump(&mut Script::default().reply(failure)).unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::NOBUFS));
}

#[test]
fn an_error_reply_is_the_kernels_errno() {
    let failure = ask(&mut Script::default().reply(error(1, -22))).unwrap_err();
    assert_eq!(failure.kernel_errno(), Some(Errno::INVAL));
    assert_eq!(failure.verb(), "query_system");
    let failure = dump(&mut Script::default().reply(error(1, -1))).unwrap_err();
    assert_eq!(failure.kernel_errno(), Some(Errno::PERM));
}

#[test]
fn answers_to_other_questions_are_passed_over() {
    let mut script = Script::default()
        .reply(error(77, -22))
        .reply(message(DATA, 0, 0, &number(1)))
        .reply(message(DATA, 0, 1, &number(42)));
    assert_eq!(ask(&mut script).unwrap(), 42);
}

#[test]
fn sequence_numbers_are_not_used_twice() {
    let mut script = Script::default()
        .reply(message(DATA, 0, 1, &number(1)))
        .reply(message(DATA, 0, 1, &number(1)))
        .reply(message(DATA, 0, 2, &number(2)));
    let mut client = Client::new(&mut script, "query_system");
    assert_eq!(client.ask(&Request::new(6), first_number).unwrap(), 1);
    assert_eq!(client.ask(&Request::new(6), first_number).unwrap(), 2);
}

#[test]
fn a_command_waits_for_its_acknowledgement() {
    let mut script = Script::default().reply(error(1, 0));
    Client::new(&mut script, "add_link").command(&Request::new(3)).unwrap();
    let flags = u16::from_ne_bytes([script.sent[0][6], script.sent[0][7]]);
    assert_eq!(flags, NLM_F_REQUEST | NLM_F_ACK);
    let mut script = Script::default().reply(error(1, -1));
    let refused = Client::new(&mut script, "add_link").command(&Request::new(3)).unwrap_err();
    assert_eq!(refused.kernel_errno(), Some(Errno::PERM));
}

#[test]
fn silence_is_a_timeout() {
    let error = ask(&mut Script::default()).unwrap_err();
    assert_eq!(error.errno(), Errno::TIMEDOUT);
}

#[test]
fn an_acknowledgement_is_no_answer() {
    let failure = ask(&mut Script::default().reply(error(1, 0))).unwrap_err();
    assert_eq!(failure.errno(), Errno::BADMSG);
}

#[test]
fn malformed_answers_are_errors() {
    let whole = message(DATA, 0, 1, &number(1));
    let mut cases: Vec<(&str, Vec<u8>)> = Vec::new();
    for length in 1..whole.len() {
        cases.push(("cut off", whole[..length].to_vec()));
    }
    for length in [0u32, 1, 15, 25, u32::MAX] {
        let mut bytes = whole.clone();
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
        cases.push(("message length", bytes));
    }
    for length in [0u16, 1, 3, 9, u16::MAX] {
        let mut bytes = whole.clone();
        bytes[16..18].copy_from_slice(&length.to_ne_bytes());
        cases.push(("attribute length", bytes));
    }
    cases.push(("number of odd width", message(DATA, 0, 1, &attribute(1, &[0; 3]))));
    cases.push(("stray bytes", message(DATA, 0, 1, &[8, 0])));
    cases.push(("short error", message(NLMSG_ERROR, 0, 1, &[0; 3])));
    cases.push(("short end", message(NLMSG_DONE, 0, 1, &[0; 3])));
    for status in [1, 22, 4096, -4096, i32::MIN, i32::MAX] {
        cases.push(("status", error(1, status)));
    }
    cases.push(("end status", message(NLMSG_DONE, 0, 1, &i32::MIN.to_ne_bytes())));
    for (what, bytes) in cases {
        let failure = ask(&mut Script::default().reply(bytes.clone())).unwrap_err();
        assert_eq!(failure.errno(), Errno::BADMSG, "{what}: {bytes:?}: {failure}");
    }
}

#[test]
fn a_last_message_may_lack_its_padding() {
    let mut bytes = message(DATA, 0, 1, &attribute(1, &[7]));
    bytes.truncate(bytes.len() - 3);
    let length = bytes.len() as u32;
    bytes[..4].copy_from_slice(&length.to_ne_bytes());
    assert_eq!(ask(&mut Script::default().reply(bytes)).unwrap(), 7);
}

#[test]
fn messages_of_odd_length_are_padded_to_the_next() {
    let mut bytes = message(NLMSG_NOOP, 0, 1, &[0xff]);
    bytes.extend(message(DATA, 0, 1, &number(42)));
    assert_eq!(ask(&mut Script::default().reply(bytes)).unwrap(), 42);
}

#[test]
fn flags_in_an_attribute_type_are_ignored() {
    let nested = message(DATA, 0, 1, &attribute(0x8001, &[7]));
    let mut script = Script::default().reply(nested);
    let kind = Client::new(&mut script, "query_system")
        .ask(&Request::new(6), |attributes| Ok(attributes.iter().next().unwrap()?.0))
        .unwrap();
    assert_eq!(kind, 1);
}

#[test]
fn strings_end_at_their_terminator() {
    let value = |bytes| NetlinkValue(bytes).string();
    assert_eq!(value(b"rxe0\0"), "rxe0");
    assert_eq!(value(b"rxe0"), "rxe0");
    assert_eq!(value(b"rxe0\0junk"), "rxe0");
    assert_eq!(value(b""), "");
    assert_eq!(value(b"\xffx\0"), "\u{fffd}x");
}
