// What nginx.conf.template cannot say by itself. Runs inside nginx (njs), once for each request that needs it.

import crypto from 'crypto';

// HTTP status -> a code for programs, a sentence for people, and the status of gRPC.
const REFUSALS = {
    400: ['INVALID_REQUEST', 'the request cannot be read', 3],
    401: ['UNAUTHORIZED', 'the key is missing or not known; send the header `Authorization: Bearer KEY`', 16],
    403: ['FORBIDDEN', 'this is not for clients', 7],
    404: ['NOT_FOUND', 'there is nothing at this address', 12],
    405: ['METHOD_NOT_ALLOWED', 'this address does not take this method', 12],
    408: ['TOO_SLOW', 'the request did not arrive in time', 4],
    413: ['TOO_MANY_BYTES', 'the request has more bytes than this gateway takes', 3],
    414: ['TOO_MANY_BYTES', 'the address is too long', 3],
    415: ['COMPRESSED', 'compressed requests are not taken; images are compressed already', 12],
    429: ['TOO_MANY_REQUESTS', 'this key has sent too many requests; try again later, more slowly', 8],
    431: ['TOO_MANY_BYTES', 'the head of the request is too long', 3],
    500: ['SERVER_FAILURE', 'the server failed; its log says more', 13],
    502: ['SERVER_LOST', 'no server is there, or it ended before it answered; try again later', 14],
    503: ['OVERLOADED', 'no server is ready; try again later', 14],
    504: ['SERVER_SILENT', 'the server did not answer in time', 4],
};
// Answers beyond this size are passed on without looking for the release in them.
const LONGEST_READ = 4 * 1024 * 1024;

// SHA-256 of the key that came along, in hexadecimal; empty if none did.
function keyHash(r) {
    const bearer = /^Bearer +([\x21-\x7e]+)$/i.exec(r.headersIn['Authorization'] || '');
    return bearer ? crypto.createHash('sha256').update(bearer[1]).digest('hex') : '';
}

// Which servers answer. nginx's own random id decides, not the one that a client can choose.
function track(r) {
    return drawn(r, 0) < Number(r.variables.canary_percent) ? 'canary' : 'stable';
}

// Whether other servers are asked the same, too, by way of trial.
function shadowed(r) {
    return r.variables.operation === 'infer' && drawn(r, 8) < Number(r.variables.shadow_percent) ? '1' : '';
}

// A number from 0 up to and without 100, out of 8 of the 32 hexadecimal digits of the request's random id.
function drawn(r, digit) {
    return parseInt(r.variables.request_id.substring(digit, digit + 8), 16) / 0x100000000 * 100;
}

// The body of an answer that the gateway gives itself.
function refusal(r) {
    // nginx has numbers of its own for requests whose head or TLS is at fault: from 494 to 497.
    const known = REFUSALS[r.variables.status] || REFUSALS[400];
    return refusalBody(r, known[0], known[1]);
}

function refusalBody(r, code, sentence) {
    return JSON.stringify({error: `${code}: ${sentence}`, code: code, request_id: r.variables.id}) + '\n';
}

// The same for gRPC, where the status that led here stands in the address.
function grpcRefusal(r) {
    return REFUSALS[r.uri.substring('/.grpc/'.length)];
}

function grpcCode(r) {
    return String(grpcRefusal(r)[2]);
}

function grpcMessage(r) {
    const known = grpcRefusal(r);
    return `${known[0]}: ${known[1]}`;
}

// The answer to what Triton calls its own failure, which it also is when it was asked in no JSON, or in another.
function explainFailure(r) {
    const head = r.variables.operation === 'infer' ? requestHead(r) : undefined;
    r.headersOut['Content-Type'] = 'application/json';
    if (head !== undefined && !isInferenceRequest(head)) {
        const sentence = 'the request is not JSON, or not as the v2 inference protocol wants it';
        r.return(400, refusalBody(r, 'INVALID_JSON', sentence));
    } else {
        r.return(500, refusalBody(r, REFUSALS[500][0], REFUSALS[500][1]));
    }
}

// The JSON that a request begins with. Undefined if it was too long to be kept in memory: nginx has no way to it then.
function requestHead(r) {
    if (r.variables.request_body_file) {
        return undefined;
    }
    const body = r.requestBuffer || Buffer.alloc(0);
    const length = r.headersIn['Inference-Header-Content-Length'];
    return body.slice(0, length === undefined ? body.length : Number(length)).toString();
}

function isInferenceRequest(text) {
    try {
        const inputs = JSON.parse(text).inputs;
        return Array.isArray(inputs) && inputs.every(isTensor);
    } catch (error) {
        return false;
    }
}

function isTensor(input) {
    return typeof input.name === 'string' && typeof input.datatype === 'string' && Array.isArray(input.shape)
        && input.shape.every((size) => Number.isInteger(size) && size >= 0);
}

// The parts of an answer that have come so far.
let parts = [];
let size = 0;

function readHttpAnswer(r, part, flags) {
    readAnswer(r, part, flags, readJson);
}

function readGrpcAnswer(r, part, flags) {
    readAnswer(r, part, flags, readProtobuf);
}

// Pass on a part of an answer as it is; with the last, note which model and release the answer came from.
function readAnswer(r, part, flags, read) {
    r.sendBuffer(part, flags);
    if (r.variables.operation !== 'infer' || r.status !== 200) {
        return;
    }
    size += part.length;
    if (size <= LONGEST_READ) {
        parts.push(part);
    }
    if (flags.last && size <= LONGEST_READ) {
        try {
            read(r, Buffer.concat(parts));
        } catch (error) {
            r.warn(`the release cannot be read from an answer: ${error.message}`);
        }
    }
}

function readJson(r, body) {
    const length = Number(r.headersOut['Inference-Header-Content-Length'] || body.length);
    const answer = JSON.parse(body.slice(0, length).toString());
    r.variables.model = answer.model_name;
    let start = length;
    answer.outputs.forEach((output) => {
        const bytes = (output.parameters || {}).binary_data_size;
        if (output.name === 'release') {
            r.variables.release = bytes ? firstString(body.slice(start, start + bytes)) : output.data[0];
        }
        start += bytes || 0;
    });
}

// A message ModelInferResponse, behind the five bytes that gRPC puts before each message.
function readProtobuf(r, body) {
    if (body.length < 5 || body[0] !== 0) {
        return;
    }
    const names = [];
    const contents = [];
    fields(body.slice(5), (number, value) => {
        if (number === 1) {
            r.variables.model = value.toString();
        } else if (number === 5) {
            fields(value, (inner, name) => inner === 1 && names.push(name.toString()));
        } else if (number === 6) {
            contents.push(value);
        }
    });
    const index = names.indexOf('release');
    if (index >= 0 && contents.length > index) {
        r.variables.release = firstString(contents[index]);
    }
}

// Call visit(number, value) for each field of a protobuf message that holds bytes.
function fields(message, visit) {
    let at = 0;
    function varint() {
        let value = 0;
        for (let factor = 1; ; factor *= 128) {
            const byte = message[at++];
            value += (byte & 127) * factor;
            if (!(byte >= 128)) { // also where the message ends
                return value;
            }
        }
    }
    while (at < message.length) {
        const tag = varint();
        if (tag % 8 === 2) {
            const end = varint() + at;
            visit(Math.floor(tag / 8), message.slice(at, end));
            at = end;
        } else if (tag % 8 === 0) {
            varint();
        } else {
            at += tag % 8 === 1 ? 8 : 4;
        }
    }
}

// The first string of a BYTES tensor: four bytes of length, little-endian, and then its own.
function firstString(tensor) {
    return tensor.slice(4, 4 + tensor.readUInt32LE(0)).toString();
}

export default {
    keyHash, track, shadowed, refusal, grpcCode, grpcMessage, explainFailure, readHttpAnswer, readGrpcAnswer,
};
