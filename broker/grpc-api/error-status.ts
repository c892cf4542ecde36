// Maps errors to gRPC: a status, with Farhand's error code and its details in the trailing metadata.
import { status as grpcStatus, Metadata } from '@grpc/grpc-js';
import { type AppError, type Code, codes } from '../../shared/errors.ts';

/** gRPC status by the HTTP status that REST uses for the same error. */
const statuses: Readonly<Record<(typeof codes)[Code], grpcStatus>> = {
  400: grpcStatus.INVALID_ARGUMENT,
  401: grpcStatus.UNAUTHENTICATED,
  403: grpcStatus.PERMISSION_DENIED,
  404: grpcStatus.NOT_FOUND,
  405: grpcStatus.UNIMPLEMENTED,
  409: grpcStatus.FAILED_PRECONDITION,
  412: grpcStatus.FAILED_PRECONDITION,
  413: grpcStatus.RESOURCE_EXHAUSTED,
  416: grpcStatus.OUT_OF_RANGE,
  422: grpcStatus.INVALID_ARGUMENT,
  429: grpcStatus.RESOURCE_EXHAUSTED,
  500: grpcStatus.INTERNAL,
  501: grpcStatus.UNIMPLEMENTED,
  503: grpcStatus.UNAVAILABLE,
  507: grpcStatus.RESOURCE_EXHAUSTED,
};

/** gRPC status by error code, where gRPC distinguishes more than HTTP. */
const finer: Partial<Record<Code, grpcStatus>> = {
  already_exists: grpcStatus.ALREADY_EXISTS,
  file_busy: grpcStatus.ABORTED,
  machine_timeout: grpcStatus.DEADLINE_EXCEEDED,
};

/** Longest message and details in characters: clients accept 8 KiB of metadata in all by default. */
const longestMessage = 1_000;
const longestDetails = 4_000;

export interface Refusal {
  code: grpcStatus;
  details: string;
  metadata: Metadata;
}

export function refusalOf(error: AppError, requestId: string): Refusal {
  const metadata = trailersOf(requestId);
  metadata.set('farhand-code', error.code);
  metadata.set('farhand-details', detailsOf(error));
  return {
    code: finer[error.code] ?? statuses[codes[error.code]],
    // grpc-js cannot encode half a character, which slice() may leave.
    details: error.message.slice(0, longestMessage).toWellFormed(),
    metadata,
  };
}

export function trailersOf(requestId: string): Metadata {
  const metadata = new Metadata();
  metadata.set('farhand-request-id', requestId);
  return metadata;
}

/** Details as JSON in ASCII, because metadata must be ASCII. */
function detailsOf({ details }: AppError): string {
  const text = JSON.stringify(details).replaceAll(
    /[^\x20-\x7e]/g,
    (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, '0')}`,
  );
  return text.length > longestDetails ? '{}' : text;
}
