//! Envelopes that are opened, damaged and forged, on a scripted kernel.

use super::*;
use crate::tests::hostile::explore;
use crate::uverbs::scripted::Script;

fn sealed(script: &Script) -> (crate::Context, Envelope) {
    let context = script.open("rxe0");
    let envelope = Envelope::seal(&context.file, ObjectKind::MR, 5, [1, 2, u64::MAX, 0]);
    (context, envelope)
}

/// Computes the CRC anew.
fn reseal(bytes: &mut [u8; Envelope::SIZE]) {
    bytes[Envelope::SIZE - 4..].fill(0);
    let check = crc32(bytes).to_le_bytes();
    bytes[Envelope::SIZE - 4..].copy_from_slice(&check);
}

#[test]
fn opening_returns_the_sealed_handle_and_facts() {
    let script = Script::new();
    let (context, envelope) = sealed(&script);
    let received = Envelope::from_bytes(&envelope.to_bytes()).unwrap();
    assert_eq!(received, envelope);
    assert_eq!((received.kind(), received.handle()), (ObjectKind::MR, 5));
    let opened = received.open("import_mr", &context.file, ObjectKind::MR).unwrap();
    assert_eq!(opened, (5, [1, 2, u64::MAX, 0]));
}

#[test]
fn the_bytes_of_version_1_do_not_change() {
    let device =
        DeviceIdentity { driver: 14, major: 231, minor: 192, index: Some(3), guid: 0x0102 };
    let kind = ObjectKind::PD;
    let envelope = Envelope { kind, handle: 7, device, origin: 0x1122, fingerprint: [1, 2, 3, 4] };
    let mut expected = Vec::from(*b"uverbs\x01\x00\x01\x00\x00\x00");
    for word in [14u32, 231, 192, 3, 7] {
        expected.extend(word.to_le_bytes());
    }
    for word in [0x0102u64, 0x1122, 1, 2, 3, 4] {
        expected.extend(word.to_le_bytes());
    }
    expected.extend([0; 4]);
    // A CRC that another program computed.
    expected.extend(0x5c52_7d2au32.to_le_bytes());
    assert_eq!(envelope.to_bytes()[..], expected[..]);
}

#[test]
fn the_crc_is_that_of_ieee_802_3() {
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
}

#[test]
fn an_envelope_of_another_kind_is_refused() {
    let script = Script::new();
    let (context, envelope) = sealed(&script);
    let error = envelope.open("import_pd", &context.file, ObjectKind::PD).unwrap_err();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None));
    assert!(error.message().contains("memory region"), "{error}");
}

#[test]
fn an_envelope_of_another_context_is_refused() {
    let script = Script::new();
    let (_context, envelope) = sealed(&script);
    let other = Script::new().open("rxe0");
    let error = envelope.open("import_mr", &other.file, ObjectKind::MR).unwrap_err();
    assert_eq!(error.errno(), Errno::XDEV, "{error}");
}

#[test]
fn an_envelope_of_another_device_is_refused() {
    let script = Script::new();
    let (context, envelope) = sealed(&script);
    let changes: [fn(&mut DeviceIdentity); 4] = [
        |identity| identity.minor += 1,
        |identity| identity.major += 1,
        |identity| identity.driver += 1,
        |identity| identity.guid = 0x55,
    ];
    let refused = changes.map(|change| {
        let mut other = envelope;
        // A device without a GUID matches any GUID.
        other.device.guid = 0x44;
        change(&mut other.device);
        other.open("import_mr", &context.file, ObjectKind::MR).is_err()
    });
    assert_eq!(refused, [true, true, true, false]);
    let identity = DeviceIdentity { index: Some(3), ..envelope.device };
    assert!(!identity.matches(&DeviceIdentity { index: Some(4), ..identity }));
    assert!(identity.matches(&DeviceIdentity { index: None, ..identity }));
    let named = DeviceIdentity { guid: 1, ..identity };
    assert!(!named.matches(&DeviceIdentity { guid: 2, ..identity }));
}

#[test]
fn an_envelope_without_an_origin_opens_in_every_context() {
    let script = Script::new();
    let (context, envelope) = sealed(&script);
    let anonymous = Envelope { origin: 0, ..envelope };
    assert!(anonymous.open("import_mr", &context.file, ObjectKind::MR).is_ok());
}

#[test]
#[cfg_attr(miri, ignore = "safe code, in too many rounds")]
fn every_damaged_bit_is_noticed() {
    let (_context, envelope) = sealed(&Script::new());
    let sound = envelope.to_bytes();
    for bit in 0..8 * sound.len() {
        let mut bytes = sound;
        bytes[bit / 8] ^= 1 << (bit % 8);
        let error = Envelope::from_bytes(&bytes).unwrap_err();
        assert!(matches!(error.errno(), Errno::INVAL | Errno::OPNOTSUPP), "bit {bit}: {error}");
    }
}

#[test]
fn every_wrong_length_is_noticed() {
    let (_context, envelope) = sealed(&Script::new());
    let mut bytes = envelope.to_bytes().to_vec();
    for length in 0..bytes.len() {
        assert!(Envelope::from_bytes(&bytes[..length]).is_err(), "{length} bytes");
    }
    bytes.push(0);
    assert!(Envelope::from_bytes(&bytes).is_err());
}

#[test]
fn an_envelope_of_a_later_version_is_unsupported() {
    let (_context, envelope) = sealed(&Script::new());
    let mut bytes = envelope.to_bytes();
    bytes[6] = 2;
    reseal(&mut bytes);
    let error = Envelope::from_bytes(&bytes).unwrap_err();
    assert!(error.is_unsupported() && error.message().contains("version 2"), "{error}");
}

#[test]
fn reserved_bytes_must_be_zero() {
    let (_context, envelope) = sealed(&Script::new());
    for at in [10, 11, 80, 83] {
        let mut bytes = envelope.to_bytes();
        bytes[at] = 1;
        reseal(&mut bytes);
        assert!(Envelope::from_bytes(&bytes).is_err(), "byte {at}");
    }
}

/// Damaged bytes cause no panic and no command to the kernel, and an accepted envelope encodes to the bytes that
/// it was read from. Half of the inputs have a right CRC, so that they reach the checks behind it.
#[test]
fn forged_bytes_do_not_reach_the_kernel() {
    let script = Script::new();
    let (context, envelope) = sealed(&script);
    let asked = script.log().len();
    let known = [envelope.to_bytes().to_vec()];
    let tally = explore("envelopes", 1, &known, |bytes| {
        let mut bytes = bytes.to_vec();
        if let Some(whole) = bytes.first_chunk_mut::<{ Envelope::SIZE }>() {
            if whole.iter().fold(0, |parity, byte| parity ^ byte) & 1 != 0 {
                reseal(whole);
            }
        }
        let Ok(received) = Envelope::from_bytes(&bytes) else { return false };
        assert_eq!(received.to_bytes()[..], bytes[..]);
        for kind in [ObjectKind::MR, ObjectKind::PD] {
            if let Err(error) = received.open("import_mr", &context.file, kind) {
                assert!(!error.to_string().is_empty() && error.kernel_errno().is_none());
            }
        }
        assert!(!format!("{received:?}").is_empty());
        true
    });
    assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
    assert_eq!(script.log().len(), asked, "the kernel was asked");
}

#[cfg(feature = "serde")]
#[test]
fn readable_formats_have_digits_and_compact_ones_bytes() {
    use serde_test::{Configure, Token, assert_de_tokens_error, assert_tokens};
    let (_context, envelope) = sealed(&Script::new());
    let bytes: &'static [u8] = envelope.to_bytes().to_vec().leak();
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_tokens(&envelope.compact(), &[Token::Bytes(bytes)]);
    assert_tokens(&envelope.readable(), &[Token::Str(digits.clone().leak())]);
    let wrong = digits.replacen("75", "76", 1);
    // Miri's text of an errno differs.
    let error =
        format!("open_envelope: 88 bytes that do not begin as an envelope does ({})", Errno::INVAL);
    assert_de_tokens_error::<serde_test::Readable<Envelope>>(&[Token::Str(wrong.leak())], &error);
}
